"""`python -m bench.mutants`; the runner is a module of its own, since workers are forked from it."""

import sys

from .runner import main

sys.exit(main())
