"""`python -m lowtide` is `lowtide`."""

import sys

from lowtide.python_process import leave_current_folder

leave_current_folder()

from lowtide.cli.main import main  # noqa: E402

sys.exit(main())
