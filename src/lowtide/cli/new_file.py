"""Files that a command writes for a user to begin with, and never over one that is there."""

from __future__ import annotations

from pathlib import Path

from lowtide.cli.endings import UsageError


def write_new(path: Path, text: str) -> None:
    """Writes a file that is not there yet.

    Raises:
        UsageError: it is there, or a link of its name.
        OSError: it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already: give another --output, or remove it") from None
