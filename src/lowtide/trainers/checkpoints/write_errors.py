"""What a checkpoint that could not be written says: the reason, the folder, and the bytes wanted and free.

A full disk shows in three ways: as an `OSError` in Python, as a `SafetensorError` with the system's text, and in
`torch.save` as a `RuntimeError` that tells a line of C++ and no reason. So the reason is asked for again: by writing a
small file into the same folder, and from the limits of the process.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lowtide.memory.allocators.measure import bytes_text

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
PROBE = 1 << 20
"""Bytes that are written to learn why others could not be."""
DISK_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def write_reason(error: BaseException, folder: Path) -> str:
    """Why a file could not be written into a folder, asked while what was written so far is still there."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "os error 28" in text or number is None:
        number = errno.ENOSPC if "os error 28" in text else errno.EFBIG if "os error 27" in text else _probe(folder)
    if number in DISK_FULL:
        return DISK_FULL[number]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and (number == errno.EFBIG or isinstance(error, RuntimeError)):
        return f"a file of this process may have {bytes_text(limit)} at most (`ulimit -f`): File too large"
    return text


def space(folder: Path, wanted: int) -> str:
    """The bytes that a checkpoint needs and those that are free, in words."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return f"The checkpoint needs {bytes_text(wanted)}"
    return f"The checkpoint needs {bytes_text(wanted)}, and {bytes_text(free)} are free"


def bytes_of(values: Iterable[Any]) -> int:
    """Bytes of all tensors in nested states."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, dict):
            total += bytes_of(value.values())
        elif isinstance(value, list | tuple):
            total += bytes_of(value)
    return total


def _probe(folder: Path) -> int | None:
    """The system's error number for writing a small file; None where that works."""
    try:
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent) as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None
