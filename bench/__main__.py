"""`python -m bench` is `python -m bench.compare`."""

import sys

from bench.compare.__main__ import main

sys.exit(main())
