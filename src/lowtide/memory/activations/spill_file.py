"""Tensors in a temporary file, so that a process on a CPU need not hold them.

The file is written and read at given places (`pwrite`, `preadv`), never mapped: a mapped page that was touched counts
as resident, a page of the system's file cache does not, and the system writes it out whenever it wants the memory.
What a moved tensor leaves is mostly a hole in the heap, which the next tensor need not fit: with each that moves, holes
are given back (`memory.allocators.host_heap`). A file in a folder that is itself in memory (`tmpfs`) would save
nothing. The file has no name: nothing is left of it, however the process ends.
"""

from __future__ import annotations

import bisect
import errno
import logging
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from lowtide.memory.allocators.host_heap import trim_heap

logger = logging.getLogger(__name__)

IN_MEMORY = ("tmpfs", "ramfs")
ON_A_DISK = "give a folder on a disk that can be written to as `activation_offloading_dir`"


def is_in_memory(folder: str | Path) -> bool:
    """Whether what is written to a folder stays in memory; on Linux, elsewhere it is taken for a disk."""
    try:
        device = os.stat(folder).st_dev
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(mount[2] == number and mount[mount.index("-") + 1] in IN_MEMORY for mount in mounts)


def folder_on_a_disk(output_dir: str) -> Path | None:
    """For a file that nobody has given a folder: None for the system's for temporary files, or, where that is in memory
    and they are not, the output folder or the one that it will be made in."""
    output = Path(output_dir).absolute()
    there = next(folder for folder in (output, *output.parents) if folder.exists())
    return there if is_in_memory(tempfile.gettempdir()) and not is_in_memory(there) else None


class Extent(NamedTuple):
    """A stretch of the file, in bytes."""

    start: int
    bytes: int


class FreeSpace:
    """Which stretches of a file are free: the first that is large enough is taken, neighbours are joined again."""

    def __init__(self) -> None:
        self.end = 0
        """The file's length so far; all behind it is free."""
        self._free: list[Extent] = []

    def take(self, size: int) -> Extent:
        for number, (start, free) in enumerate(self._free):
            if free >= size:
                self._free[number : number + 1] = [Extent(start + size, free - size)] if free > size else []
                return Extent(start, size)
        taken = Extent(self.end, size)
        self.end += size
        return taken

    def give_back(self, extent: Extent) -> None:
        place = bisect.bisect(self._free, extent)
        start, stop = extent.start, extent.start + extent.bytes
        if place < len(self._free) and self._free[place].start == stop:
            stop += self._free.pop(place).bytes
        if place and sum(self._free[place - 1]) == start:
            place -= 1
            start = self._free.pop(place).start
        if stop == self.end:
            self.end = start
        else:
            self._free.insert(place, Extent(start, stop - start))


class SpillFile:
    """The bytes of storages in an unlinked temporary file (a `Store` of `memory.activations.offloading`).

    Args:
        folder: where the file lies; by default the system's folder for temporary files, and a warning if that is in
            memory.

    Raises:
        ValueError: the folder cannot be written to, or is in memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or tempfile.gettempdir())
        if is_in_memory(self.folder):
            nothing = (
                f"activations that are offloaded to {self.folder} stay in memory, so nothing is saved: {ON_A_DISK}"
            )
            if folder is not None:
                raise ValueError(nothing)
            logger.warning(nothing)
        try:
            self._file = tempfile.TemporaryFile(prefix="lowtide-", dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"activations cannot be offloaded to {self.folder}: {error.strerror}: {ON_A_DISK}"
            ) from error
        self.space = FreeSpace()

    def needs(self, size: int) -> int:
        """A copy is as large as what it is of."""
        return size

    def put(self, tensor: Tensor) -> Extent:
        """Writes the whole storage of a tensor."""
        trim_heap()
        content = _bytes_of(tensor.untyped_storage())
        extent = self.space.take(len(content))
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(self._file.fileno(), content[written:], extent.start + written)
        except OSError as error:
            self.space.give_back(extent)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk under {self.folder} is full after {self.space.end} bytes of offloaded activations: make "
                "room, or give a folder on a larger disk as `activation_offloading_dir`",
            ) from error
        return extent

    def get(self, extent: Extent) -> UntypedStorage:
        """Reads it into a new storage."""
        trim_heap()
        storage = torch.empty(extent.bytes, dtype=torch.uint8).untyped_storage()
        content = _bytes_of(storage)
        read = 0
        while read < extent.bytes:
            count = os.preadv(self._file.fileno(), [content[read:]], extent.start + read)
            if count == 0:
                raise OSError(errno.EIO, f"the file of offloaded activations in {self.folder} has been cut short")
            read += count
        return storage

    def free(self, extent: Extent) -> None:
        """Lets the place be written again."""
        self.space.give_back(extent)


def _bytes_of(storage: UntypedStorage) -> memoryview:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
