"""Files and folders that survive a kill and a loss of power: written beside, flushed to the disk, then renamed."""

from __future__ import annotations

import os
from pathlib import Path

from lowtide.own_files import writing


def flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk.

    Raises:
        OSError: they cannot be written; a full disk may show here first.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file as a whole; a failure leaves the file that was there."""
    with writing(path) as beside:
        beside.write_text(text, encoding="utf-8")
        flush(beside)
    flush(path.parent)
