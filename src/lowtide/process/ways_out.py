"""Ways out that a message names: a script can pass an object, and a command only what its options have.

`in_python` marks the part of a message that only a script can follow. Where the run was started by the command, the
part is left out, or what the command has stands in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_by_command = False


@contextlib.contextmanager
def by_command() -> Iterator[None]:
    """Within it, runs are those that the command starts."""
    global _by_command
    before, _by_command = _by_command, True
    try:
        yield
    finally:
        _by_command = before


def in_python(text: str, command: str = "") -> str:
    """A part of a message, with the spaces and commas that join it to the rest.

    Args:
        text: what a script can do.
        command: what the command has in its place.
    """
    return command if _by_command else text
