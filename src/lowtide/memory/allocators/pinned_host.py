"""Tensors of a CUDA device in pinned host memory, copied out and in beside the computation.

Two streams of their own carry the copies, so that they overlap with kernels:

- *out*: a copy waits for the kernels before it, which wrote the tensor. Until it is done the device tensor is held
  here; the oldest of more than `IN_FLIGHT` is let go once the computation waits for its copy, so that whatever is
  written into that memory next comes after it.
- *in*: storages are wanted in the opposite order of their leaving, but for what a checkpointed layer keeps, which is
  wanted in the same. So with each that is asked for `AHEAD` more set out: of those that left just after it and still
  wait, which only such a layer leaves, and then of those before it. A copy waits for the kernels that used its memory
  before, and the computation waits for the copy.

Host buffers come from PyTorch's pool of pinned memory, which hands a freed one out again only after the copies that
touch it are done. It rounds sizes up to powers of two, and so do the sizes counted here.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lowtide.compat.torch import version_of

IN_FLIGHT = 2
"""Storages that may be on their way out while the computation goes on."""
AHEAD = 2
"""Storages that set out before they are asked for."""


def pinned_bytes(size: int) -> int:
    """What torch's pool of pinned memory takes for so many bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


class Pinned:
    """A storage in host memory, or on its way there or back."""

    def __init__(self, number: int, size: int, bytes: int, host: Tensor) -> None:
        self.number, self.size, self.bytes, self.host = number, size, bytes, host
        self.left: Any = None
        """The event after the copy out."""
        self.changed = False
        """Whether the device tensor was written to while it was being copied."""
        self.back: Tensor | None = None
        self.arrived: Any = None
        """The event after the copy in."""


class PinnedHost:
    """The bytes of storages in pinned host memory (a `Store` of `memory.activations.offloading`).

    Args:
        device: the CUDA device.
        cuda: what offers streams; a test on a CPU gives its own.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        self.out, self.into = cuda.Stream(device), cuda.Stream(device)
        self._leaving: deque[tuple[Pinned, Tensor, int]] = deque()
        self._waiting: weakref.WeakValueDictionary[int, Pinned] = weakref.WeakValueDictionary()
        """By number, in the order of leaving: what has not been asked for."""
        self._count = 0

    def needs(self, size: int) -> int:
        """What a copy of so many bytes takes."""
        return pinned_bytes(size)

    def put(self, tensor: Tensor) -> Pinned:
        """Begins to copy the storage of a tensor out."""
        size = tensor.untyped_storage().nbytes()
        stored = Pinned(self._count, size, self.needs(size), self.buffer(size))
        self._count += 1
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.out.wait_stream(self.cuda.current_stream(self.device))
        with self.cuda.stream(self.out):
            stored.host.copy_(content, non_blocking=True)
            stored.left = self.out.record_event()
        self._leaving.append((stored, tensor.detach(), version_of(tensor)))
        while len(self._leaving) > IN_FLIGHT:
            self._let_go()
        self._waiting[stored.number] = stored
        return stored

    def get(self, stored: Pinned) -> UntypedStorage:
        """The storage on the device, for the current stream; those wanted next set out as well."""
        while self._leaving:  # forward is over, and its last tensors need not be held
            self._let_go()
        if stored.changed:
            raise RuntimeError("a tensor that backward needs was changed in place while it was being offloaded")
        self._set_out(stored)
        after = range(stored.number + 1, stored.number + 1 + AHEAD)
        before = sorted((number for number in self._waiting if number < stored.number), reverse=True)
        for wanted in [self._waiting[number] for number in (*after, *before) if number in self._waiting][:AHEAD]:
            self._set_out(wanted)
        self._waiting.pop(stored.number, None)
        back, stored.back = stored.back, None
        assert back is not None, "a storage is read back once"
        self.cuda.current_stream(self.device).wait_event(stored.arrived)
        return back.untyped_storage()

    def buffer(self, size: int) -> Tensor:
        """Host memory for a copy of so many bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def free(self, stored: Pinned) -> None:
        """Forgets a copy, whether or not it was read back."""
        self._waiting.pop(stored.number, None)
        while any(stored is each for each, *_ in self._leaving):
            self._let_go()
        if stored.back is not None:  # it set out and nobody asked: its memory is the computation's again
            self.cuda.current_stream(self.device).wait_event(stored.arrived)
            stored.back = None

    def _let_go(self) -> None:
        stored, tensor, version = self._leaving.popleft()
        self.cuda.current_stream(self.device).wait_event(stored.left)
        stored.changed = version_of(tensor) != version

    def _set_out(self, stored: Pinned) -> None:
        if stored.back is not None:
            return
        stored.back = back = torch.empty(stored.size, dtype=torch.uint8, device=self.device)
        self.into.wait_stream(self.cuda.current_stream(self.device))  # which has waited for the copy out
        with self.cuda.stream(self.into):
            back.copy_(stored.host, non_blocking=True)
            stored.arrived = self.into.record_event()
