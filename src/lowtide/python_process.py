"""Python processes that this one starts: they find their modules where this one does.

`python -m` and `python -c` look into the current folder first. A file that somebody else put there under the name of a
package (`torch.py`) would be executed.
"""

from __future__ import annotations

import os
import sys

SAFE_PATH = "PYTHONSAFEPATH"
"""The variable that keeps the current folder off the path of every Python that is started."""
_OURS = "lowtide"
"""Its value where lowtide has set it; Python asks only whether there is one."""


def python_calling(module: str, function: str, *words: str) -> list[str]:
    """The command of a Python process that calls a function without arguments; `words` are its `sys.argv[1:]`."""
    begin = (
        "import sys; n = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:n]; del sys.argv[1:n]; "
        f"from {module} import {function}; {function}()"
    )
    return [sys.executable, "-P", "-c", begin, str(len(sys.path)), *sys.path, *words]


def keep_current_folder_off_the_path() -> None:
    """Holds for this process's children, and theirs, until one calls `forget_safe_path`."""
    os.environ.setdefault(SAFE_PATH, _OURS)


def forget_safe_path() -> None:
    """A process that was started safely stays so. What it starts itself (a user's tool) begins as Python does."""
    if os.environ.get(SAFE_PATH) == _OURS:
        del os.environ[SAFE_PATH]


def leave_current_folder() -> None:
    """Takes the current folder, which `python -m` puts first, off this process's path; not where lowtide lies in it."""
    here = os.getcwd()
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[:1] == [here] and own != here:
        del sys.path[0]
