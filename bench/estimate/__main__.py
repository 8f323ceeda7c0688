"""`python -m bench.estimate`: see `comparison`."""

import sys

from bench.estimate.comparison import main

sys.exit(main())
