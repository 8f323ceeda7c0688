"""`python -m tests.faults`; the runner is a module of its own, since forked processes import it by its name."""

import sys

from .runner import main

sys.exit(main())
