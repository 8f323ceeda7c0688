"""Files and folders that survive a kill and a loss of power: written beside, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        flush(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    flush(path.parent)


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link; what a link points to stays."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
