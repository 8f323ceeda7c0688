"""Tensors that lie in a file which is mapped into memory, and are let go after use.

A page of a mapped file counts as resident from its first use on, until the process says that it is not needed
(`madvise(MADV_DONTNEED)`). The tensor stays valid: the next use reads the page again, from the system's file cache or
from the disk. So a weight takes memory while it is used, and autograd may save it, since backward reads it again.

Only tensors that were declared here are let go: in any other memory the same call would lose what is in it. Files are
mapped privately, so that pages which are written to are the process's own: a tensor that was changed in place, as
merging adapters does, is kept in memory from then on.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.compat.torch import FakeTensor, is_traceable_wrapper_subclass

logger = logging.getLogger(__name__)

BAND_BYTES = 16 << 20
"""Of a weight that is used by rows, what is resident at a time."""
DONT_NEED, WILL_NEED, POPULATE_READ = 4, 3, 22
"""Advice to Linux."""
PRESENT, OF_A_FILE = np.uint64(1 << 63 | 1 << 62), np.uint64(1 << 61)
"""Bits of a page in Linux's page map: it is in memory or swapped out; it is a file's."""

_declared: dict[int, tuple[int, StorageWeakRef]] = {}
"""By address: the bytes of a storage, and whether it is still there."""


def can_let_go() -> bool:
    """Whether this system lets pages go at all."""
    return sys.platform == "linux" and _advise_function() is not None


def declare(tensor: Tensor) -> None:
    """Says that a tensor's storage lies in a mapped file, whose pages may be let go whenever it is not being used."""
    storage = tensor.untyped_storage()
    _declared[storage.data_ptr()] = storage.nbytes(), StorageWeakRef(storage)


def declare_in_files(tensors: Iterable[Tensor]) -> None:
    """Declares those of some tensors that lie in mapped files; none where this system does not let pages go."""
    if can_let_go():
        for tensor in lying_in_files(tensors):
            declare(tensor)


def keep(tensor: Tensor) -> None:
    """Takes the declaration back: the tensor is written to from here on."""
    _declared.pop(tensor.untyped_storage().data_ptr(), None)


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor's storage was declared, and is still there."""
    if not _declared or not _has_bytes(tensor):
        return False
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    found = _declared.get(address)
    if found is None:
        return False
    if found[1].expired():
        del _declared[address]
        return False
    return found[0] == storage.nbytes()


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own on the CPU: it stands for no other tensors, and for none on paper."""
    stands_for_others = isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor)
    return tensor.device.type == "cpu" and not stands_for_others


def let_go(tensor: Tensor) -> None:
    """Lets the pages of a mapped tensor go; of any other tensor nothing happens."""
    if is_mapped(tensor) and not _kept_since_written(tensor):
        _advise(tensor, DONT_NEED)


def bring_in(tensor: Tensor) -> None:
    """Makes the pages of a mapped tensor resident in one call, which is faster than page by page at their first use."""
    if is_mapped(tensor):
        _advise(tensor, POPULATE_READ)


def read_ahead(tensor: Tensor) -> None:
    """Has the system read a mapped tensor into its file cache, which this process does not wait for."""
    if is_mapped(tensor):
        _advise(tensor, WILL_NEED)


def _kept_since_written(tensor: Tensor) -> bool:
    """Whether a mapped tensor was changed in place since its pages were last let go, so that some are no longer the
    file's; it counts as mapped no more then. False where the system does not tell."""
    written = _has_own_pages(tensor)
    if written:
        logger.warning(
            f"a streamed weight {list(tensor.shape)} was changed in place, as by merging adapters into it: it stays in "
            "memory from here on"
        )
        keep(tensor)
    return written


def _has_own_pages(tensor: Tensor) -> bool:
    first, stop = _whole_pages(tensor)
    if stop <= first:
        return False
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            flags = np.frombuffer(file.read(8 * (stop - first)), dtype=np.uint64)
    except OSError:
        return False
    return bool((((flags & PRESENT) != 0) & ((flags & OF_A_FILE) == 0)).any())


def bands(weight: Float[Tensor, "rows columns"]) -> Iterator[slice]:
    """The rows of a weight in bands, each of which is resident only until the next is asked for; of a weight that is
    not mapped all at once."""
    if not is_mapped(weight) or _kept_since_written(weight):
        yield slice(0, len(weight))
        return
    for rows in row_bands(weight):
        band = weight[rows]
        _advise(band, POPULATE_READ)
        yield rows
        _advise(band, DONT_NEED)


def row_bands(weight: Shaped[Tensor, "rows ..."]) -> Iterator[slice]:
    """The rows of a weight in bands of `BAND_BYTES`."""
    rows = max(1, BAND_BYTES // max(weight[:1].nbytes, 1))
    return (slice(start, min(start + rows, len(weight))) for start in range(0, len(weight), rows))


def lying_in_files(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Those of some tensors that lie in files which this process has mapped, and in no other memory."""
    ranges = sorted(_mapped_ranges())
    return {tensor for tensor in tensors if _has_bytes(tensor) and _lies_in(tensor, ranges)}


def _lies_in(tensor: Tensor, ranges: list[tuple[int, int]]) -> bool:
    start = tensor.untyped_storage().data_ptr()
    end = start + tensor.untyped_storage().nbytes()
    return any(first <= start and end <= stop for first, stop in ranges)


def _mapped_ranges() -> list[tuple[int, int]]:
    """(start, stop) of what is mapped from files that are still there; neighbours of one file are one."""
    found: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _mode, _offset, _device, inode, *path = line.split(maxsplit=5)
        if inode == "0" or not path or path[0].endswith(" (deleted)"):
            continue
        start, stop = (int(number, 16) for number in span.split("-"))
        if found and found[-1][1:] == (start, path[0]):
            start = found.pop()[0]
        found.append((start, stop, path[0]))
    return [(start, stop) for start, stop, path in found if os.path.isfile(path)]


LEAST_BYTES = 1 << 20
"""Tensors of fewer bytes are left alone by `FilePages`."""


class FilePages:
    """Lets pages of files go that are mapped for as long as this lives, whoever mapped them."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def let_go(self, tensor: Tensor) -> None:
        """Lets the pages of a tensor go that nobody has written to; of one in other memory nothing happens."""
        if tensor.nbytes < LEAST_BYTES or not _has_bytes(tensor) or not can_let_go():
            return
        if not _lies_in(tensor, self._ranges):
            self._ranges = sorted(_mapped_ranges())
        if _lies_in(tensor, self._ranges):
            _advise(tensor, DONT_NEED)


def _whole_pages(tensor: Tensor) -> tuple[int, int]:
    """The first page that is a contiguous tensor's alone, and the one after the last: what lies at its ends may be
    another's, which was written to."""
    start = tensor.data_ptr()
    return -(-start // mmap.PAGESIZE), (start + tensor.nbytes) // mmap.PAGESIZE


def _advise(tensor: Tensor, advice: int) -> None:
    """Of the pages of a tensor. Advice that an older system does not know changes nothing."""
    advise, (first, stop) = _advise_function(), _whole_pages(tensor)
    if advise is not None and first < stop:
        advise(first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE, advice)


@functools.cache
def _advise_function() -> Any:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
