"""Weights of layers that wait in pinned host memory, and are copied to a CUDA device for their layer's use.

A copy stream brings the layer that follows while one runs. Each visit gets new memory on the device, from torch's
allocator, and what autograd saves of a weight is replaced by its place in the layer, so that nothing on the device
outlives the visit; backward finds the layer there again. Inside of a checkpointed layer nothing is saved in forward,
and what its recomputation saves is used at once.

Embedding, head and norms stay on the device: a head is read for each chunk of scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.compat.torch import is_in_backward, storage_id
from lowtide.memory.weights.streaming import Store, Unit

ALIGNMENT = 256
"""Bytes, of where a weight begins in its layer's buffer, as torch's allocator has it."""


class Visit:
    """A layer's weights on the device, or on their way."""

    def __init__(self, buffer: Tensor, arrived: Any) -> None:
        self.buffer, self.arrived = buffer, arrived
        self.is_used = False


class Home:
    """Where the weights of a layer wait in host memory.

    Args:
        starts: where each weight begins in a buffer of all of them, in bytes.
        size: bytes of that.
        waiting: each weight in host memory.
        copied: buffers of host memory that they lie in, and where each begins in a buffer of all.
    """

    def __init__(
        self,
        unit: Unit,
        starts: Sequence[int],
        size: int,
        waiting: Sequence[Tensor],
        copied: Sequence[tuple[int, Tensor]],
    ) -> None:
        self.unit, self.starts, self.size, self.waiting, self.copied = unit, starts, size, waiting, copied

    def place(self, buffer: Tensor) -> None:
        """Has the layer's weights lie in a buffer of all of them."""
        for weight, start in zip(self.unit.weights, self.starts, strict=True):
            weight.data = part_of(buffer, start, weight)

    def place_at_home(self) -> None:
        """Has them lie in host memory."""
        for weight, waiting in zip(self.unit.weights, self.waiting, strict=True):
            weight.data = waiting

    def beside(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What lies in a buffer on the device, with what it is in host memory, in bytes."""
        for start, each in self.copied:
            yield buffer[start : start + len(each)], each


def part_of(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The tensor of another's form that begins at a byte of a buffer."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


class Saved(NamedTuple):
    """A view of a layer's weights, by its place in the layer's buffer, in elements."""

    home: Home
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class PinnedLayers(Store):
    """Where the weights of layers wait.

    Args:
        device: the CUDA device.
        cuda: what offers streams; a test on a CPU gives its own.
    """

    layers_only = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        self.into = cuda.Stream(device)
        self._homes: dict[Unit, Home] = {}
        self._visits: dict[Unit, Visit] = {}

    def bring(self, unit: Unit, following: Unit | None) -> None:
        """The device's own work waits for the copy of the unit; that of the one that follows sets out."""
        self._set_out(unit)
        visit = self._visits[unit]
        if not visit.is_used:
            self.cuda.current_stream(self.device).wait_event(visit.arrived)
            self._homes[unit].place(visit.buffer)
            visit.is_used = True
        if following is not None:
            self._set_out(following)

    def leave(self, unit: Unit) -> None:
        """The weights are those in host memory again, and the device's copy is let go."""
        self._home(unit).place_at_home()
        visit = self._visits.pop(unit, None)
        if visit is not None and not visit.is_used:  # its memory is the computation's again
            self.cuda.current_stream(self.device).wait_event(visit.arrived)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """What an operation saves of a layer's weights is their place."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def buffer(self, size: int) -> Tensor:
        """Host memory for a layer."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _home(self, unit: Unit) -> Home:
        """The unit's place in host memory, made of its weights at the first call."""
        if unit not in self._homes:
            starts, size = [], 0
            for weight in unit.weights:
                starts.append(size)
                size += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
            self._homes[unit] = self._made_home(unit, starts, size)
        return self._homes[unit]

    def _made_home(self, unit: Unit, starts: Sequence[int], size: int) -> Home:
        buffer = self.buffer(size)
        parts = [part_of(buffer, start, weight) for weight, start in zip(unit.weights, starts, strict=True)]
        for weight, part in zip(unit.weights, parts, strict=True):
            part.copy_(weight.detach())
        return Home(unit, starts, size, parts, [(0, buffer)])

    def _set_out(self, unit: Unit) -> None:
        if unit in self._visits:
            return
        home = self._home(unit)
        back = torch.empty(home.size, dtype=torch.uint8, device=self.device)
        self.into.wait_stream(self.cuda.current_stream(self.device))  # its memory may still be in use there
        self._wait_for(home)
        with self.cuda.stream(self.into):
            for part, waiting in home.beside(back):
                part.copy_(waiting, non_blocking=True)
            self._visits[unit] = Visit(back, self.into.record_event())

    def _wait_for(self, home: Home) -> None:
        """Before a layer is copied: what is to be done first on the stream that brings it."""

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        if is_in_backward() or type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor
        storage = storage_id(tensor.untyped_storage())
        for unit, visit in self._visits.items():
            if storage_id(visit.buffer.untyped_storage()) == storage:
                offset = int(tensor.storage_offset())
                return Saved(self._homes[unit], tensor.dtype, tensor.size(), tensor.stride(), offset)
        return tensor

    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.bring(saved.home.unit, None)
        buffer = self._visits[saved.home.unit].buffer
        return buffer.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
