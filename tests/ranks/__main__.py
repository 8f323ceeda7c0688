"""`python -m tests.ranks`: ten steps over two and four ranks, beside the same ten on one rank.

Each way to spread a run trains the tiny Llama of the tests in float32: in every trainer of decoders, on ragged, packed,
shared-prefix and partly scored rows, with accumulation, all weights and LoRA. Printed, in Markdown, is how far the
losses and the trained weights of each way are from those of one rank. Some twenty minutes on two cores.
"""

from __future__ import annotations

import sys

from tests.support.ranks.ten_steps import compare

sys.exit(compare(sys.argv[1:], __doc__))
