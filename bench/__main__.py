"""`python -m bench` is `python -m bench.compare`."""

import sys

from bench.compare import main

sys.exit(main())
