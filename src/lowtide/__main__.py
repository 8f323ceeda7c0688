"""`python -m lowtide` is `lowtide`."""

import sys

from lowtide.cli.main import main

sys.exit(main())
