"""Where the keys and values of a long row wait, and their gradients (see `ops.attention.piece_keys`), when not on the
device.

From a GPU they go to pinned host memory, from a CPU to a file (`memory.activations.spill_file`). They come back a piece
and a layer at a time, for as long as they are read. Exact: the bytes come back as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.compat.torch import FakeTensor
from lowtide.memory.activations.spill_file import SpillFile
from lowtide.ops.attention.piece_keys import KeyPlace, OnDevice, compact

DEVICE, HOST = "device", "host"
"""The values of `chain_storage`."""


def place_maker(
    storage: str, model: nn.Module, device: torch.device, folder: str | Path | None = None
) -> Callable[[], KeyPlace]:
    """Makes the place where the keys of a long row wait.

    Args:
        storage: the value of `chain_storage`.

    The other arguments, and what is raised, are those of `host_place`.
    """
    if storage == DEVICE:
        return OnDevice
    place = host_place(model, device, folder)
    return lambda: place


def host_place(model: nn.Module, device: torch.device, folder: str | Path | None = None) -> KeyPlace:
    """The place on the host that serves a device.

    Args:
        model: whose parameters say whether there are values at all.
        folder: for the file, where the device is a CPU; by default the system's folder for temporary files.

    Raises:
        ValueError: the folder cannot be written to or is in memory, or the device is neither a CPU nor a CUDA device.
    """
    if isinstance(next(model.parameters(), None), FakeTensor):
        return Nowhere()
    if device.type == "cpu":
        return InFile(folder)
    if device.type == "cuda":
        return InPinnedMemory()
    raise ValueError(f"chain_storage={HOST!r} is for a CPU or a CUDA device, not for {device}")


class Written(NamedTuple):
    """A tensor in the file."""

    extent: Any
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class InFile:
    """A file, from a CPU."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.file = SpillFile(folder)

    def keep(self, tensor: Tensor) -> Entry:
        tensor = compact(tensor)
        stands = Written(self.file.put(tensor), tensor.dtype, tensor.size(), tensor.stride())
        return Entry(stands, lambda: self.file.free(stands.extent))

    def read(self, kept: Entry) -> Tensor:
        extent, dtype, size, stride = kept.stands
        return torch.empty(0, dtype=dtype).set_(self.file.get(extent), 0, size, stride)  # type: ignore[call-overload]

    def free(self, kept: Entry) -> None:
        kept.free()


class Entry:
    """What stands for a tensor; where it is dropped unfreed, as by a step that failed, its place is freed all the
    same."""

    def __init__(self, stands: Any, free: Any) -> None:
        self.stands = stands
        self.free = weakref.finalize(self, free)
        self.free.atexit = False


class InPinnedMemory:
    """Pinned host memory, from a GPU; copies are in the order of its computation."""

    def keep(self, tensor: Tensor) -> tuple[Tensor, torch.device]:
        tensor = compact(tensor)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True), tensor.device

    def read(self, kept: tuple[Tensor, torch.device]) -> Tensor:
        host, device = kept
        return host.to(device, non_blocking=True)

    def free(self, kept: tuple[Tensor, torch.device]) -> None:
        """torch's pool hands the memory out again once the copies that touch it are done."""


class Nowhere:
    """The place of tensors without values, which have sizes alone."""

    class Size(NamedTuple):
        size: torch.Size
        stride: tuple[int, ...]
        dtype: torch.dtype

    def keep(self, tensor: Tensor) -> Size:
        tensor = compact(tensor)
        return self.Size(tensor.size(), tensor.stride(), tensor.dtype)

    def read(self, kept: Size) -> Tensor:
        return torch.empty_strided(kept.size, kept.stride, dtype=kept.dtype)

    def free(self, kept: Size) -> None:
        """There is nothing."""
