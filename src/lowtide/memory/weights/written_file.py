"""Tensors in a temporary file that is mapped into memory and written to: trained weights and an optimizer's states.

A page that was used counts as resident until it is let go (`ops.mapped`); what was written to it stays in the system's
file cache, from where the system writes it to the disk when it wants the memory. So the process holds what it is
using, and the tensors stay ordinary tensors. Room on the disk is taken before a tensor is mapped: a full disk is an
error then, and not a signal later. The file has no name: nothing is left of it, however the process ends.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.memory.activations.spill_file import is_in_memory
from lowtide.ops.mapped import declare, let_go, row_bands

WAY_OUT = "give an output_dir on a disk with room, or leave trained_weights out"


class WrittenFile:
    """A temporary file that tensors lie in.

    Args:
        folder: where it lies, on a disk.

    Raises:
        ValueError: the folder cannot be written to, or is in memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._end = folder, 0
        if is_in_memory(folder):
            raise ValueError(f"weights that are streamed to {folder} stay in memory, so nothing is saved: {WAY_OUT}")
        try:
            self._file = tempfile.TemporaryFile(prefix="lowtide-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"weights cannot be streamed to {folder}: {error.strerror}: {WAY_OUT}") from error

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in the file.

        Raises:
            OSError: the disk is full.
        """
        size = max(math.prod(shape) * dtype.itemsize, 1)
        room = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self._end, room)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk under {self.folder} is full after {self._end} bytes of streamed weights: {WAY_OUT}",
            ) from error
        mapped = mmap.mmap(self._file.fileno(), room, offset=self._end)
        self._end += room
        made = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape)).view(shape)
        declare(made)
        return made

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A tensor's values, in the file; neither it nor the copy is resident afterwards, if both are mapped."""
        made = self.zeros(tensor.shape, tensor.dtype)
        for part, source in by_rows(made, tensor):
            part.copy_(source)
            let_go(part)
            let_go(source)
        return made

    def take(self, parameters: list[nn.Parameter]) -> None:
        """Moves parameters into the file."""
        for parameter in parameters:
            parameter.data = self.copy_of(parameter.detach())


class NoFile:
    """Where the tensors of a plan lie, which have sizes and no bytes."""

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy_of(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def file_beside(output_dir: str) -> WrittenFile:
    """One in the output folder, or in the folder that it will be made in.

    Raises:
        ValueError: nothing can be written there, or it is in memory.
    """
    output = Path(output_dir).absolute()
    return WrittenFile(next(folder for folder in (output, *output.parents) if folder.is_dir()))


def by_rows(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Parts of tensors of one shape, of a few megabytes each; a contiguous tensor is cut along its first dimension."""
    first = tensors[0]
    if first.dim() == 0 or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]
    return [tuple(tensor[rows] for tensor in tensors) for rows in row_bands(first)]
