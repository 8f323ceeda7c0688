"""Whether a run may write into its output folder, asked before anything is loaded."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lowtide.trainers.checkpoints.whole import STAGING

OF_FOLDERS = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+|{re.escape(STAGING)}")
"""Names that a run gives to folders in its output folder."""


def check_output(folder: Path, read: Mapping[str, Any], *, saves: bool = True) -> None:
    """Refuses an output folder that cannot be one, or that the run reads from.

    Args:
        read: by option or argument, what the run reads: those that are paths are looked at.
        saves: whether the run writes checkpoints; without them it only needs a name that a folder can have.

    Raises:
        ValueError: names the file, or the option that names the same folder.
    """
    if "\0" in str(folder):
        raise ValueError(f"output_dir={str(folder)!r} has a zero byte, which no name of a folder has")
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"output_dir={str(folder)!r} is a file: name a folder, or one that is not there yet")
    _check_writable(folder, saves=saves)
    if not saves:
        return
    for name, value in read.items():
        path = Path(value) if isinstance(value, str | os.PathLike) and os.fspath(value) else None
        if path is not None and path.is_dir() and path.expanduser().resolve() == folder.resolve():
            raise ValueError(
                f"output_dir={str(folder)!r} is the folder of {name} too, whose files the run would write over: name "
                "another output_dir"
            )
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if OF_FOLDERS.fullmatch(path.name) and not path.is_dir():
            raise ValueError(
                f"{path} is a file, and a run makes a folder of that name: move it away, or name another output_dir"
            )


def _check_writable(folder: Path, *, saves: bool) -> None:
    """Refuses a folder that cannot be made, or written into by a run that saves, by making one there for a moment."""
    if folder.is_dir() and not saves:
        return
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    try:
        with tempfile.TemporaryDirectory(prefix=STAGING, dir=there):
            pass
    except OSError as error:
        what = "cannot be written to" if there == folder else f"cannot be made in {str(there)!r}"
        raise ValueError(
            f"output_dir={str(folder)!r} {what} ({error.strerror}): name a folder that this run may write to"
        ) from error
