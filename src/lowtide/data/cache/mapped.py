"""Giving back the pages of cache files that this process has looked at through a memory mapping.

A mapped file costs no memory of one's own, but each page that was read stays in the process's resident set until the
kernel needs it, so that reading a large dataset once looks like holding it. `madvise(MADV_DONTNEED)` on a read-only
mapping of a file drops these pages from the process at once; the data stays where it is, in the file and in the page
cache, and comes back when it is read again.
"""

import ctypes
import os
import sys
from collections.abc import Iterable

from datasets import Dataset

MADV_DONTNEED = 4
READ_ONLY = (b"r--p", b"r--s")


def mapped_files(dataset: Dataset) -> tuple[str, ...]:
    """The files that a dataset is mapped from; none for one in memory."""
    return tuple(os.path.realpath(file["filename"]) for file in dataset.cache_files)


def release_pages(files: Iterable[str]) -> None:
    """Drop this process's pages of these files, wherever it has them mapped. Does nothing elsewhere than on Linux."""
    wanted = {os.fsencode(file) for file in files}
    if not wanted or sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps", "rb") as maps:
        # address range, permissions, offset, device, inode, path
        mappings = [fields for line in maps if len(fields := line.rstrip(b"\n").split(maxsplit=5)) == 6]
    for addresses, permissions, *_, path in mappings:
        if path in wanted and permissions in READ_ONLY:
            start, end = (int(address, 16) for address in addresses.split(b"-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
