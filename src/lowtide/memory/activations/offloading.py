"""Activation offloading: what backward needs of a forward waits elsewhere, and comes back when backward asks for it.

`torch.autograd.graph.saved_tensors_hooks` hands every tensor that an operation keeps for backward to
`ActivationOffload`, which moves its storage away: to a file where the model is on a CPU
(`memory.activations.spill_file`), to pinned host memory where it is on a GPU (`memory.allocators.pinned_host`). With
gradient checkpointing what is kept are the inputs of the layers, and those go. The idea is that of
`torch.autograd.graph.save_on_cpu` and of torchtune's activation offloading, which copy each saved tensor; here a
storage goes once, however many operations and views share it.

Exact: the bytes come back as they were.

What stays, because somebody holds it through the step anyway and moving a copy would only cost: parameters and buffers
(and views of them: tied weights, frozen bases of adapters, quantized weights), leaves that want a gradient, integers
(token ids, positions and indices, which are the batch's own), and everything below a size, which covers the outputs
of a model with the fused head, [scores]. What a backward itself saves (the recomputation of a reentrant checkpoint) is
wanted at once and stays too.

What a checkpointed layer keeps by a policy passes no hook: `memory.activations.checkpointing` hands it to `hold`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.compat.torch import (
    FakeTensor,
    base_of,
    gathered_weights,
    is_in_backward,
    is_traceable_wrapper_subclass,
    storage_id,
    version_of,
)
from lowtide.memory.activations.spill_file import SpillFile
from lowtide.memory.allocators.host_heap import trim_heap
from lowtide.memory.allocators.pinned_host import PinnedHost

MIN_BYTES = 1 << 16

_around: ContextVar[ActivationOffload | None] = ContextVar("_around", default=None)
"""The offload whose forward this is."""


def hold(tensor: Tensor) -> Held:
    """What stands for a tensor until backward: it is moved away, if activations are and it is one of those that go."""
    offload = _around.get()
    return Stayed.as_it_is(tensor) if offload is None else offload.hold(tensor)


class Nowhere:
    """Where the storages of fake tensors go, which have sizes and no bytes."""

    class Size(NamedTuple):
        bytes: int

    def needs(self, size: int) -> int:
        return size

    def put(self, tensor: Tensor) -> Size:
        trim_heap()  # as a file's does
        return self.Size(tensor.untyped_storage().nbytes())

    def get(self, stored: Size) -> Tensor:
        """A tensor: fake tensors' mode would remember a storage that it meets, and with it hold its bytes."""
        return torch.empty(stored.bytes, dtype=torch.uint8)

    def free(self, stored: Size) -> None:
        pass


Store = SpillFile | PinnedHost | Nowhere
"""Where storages go; what `put` returns stands for a copy, and tells its `bytes`."""


class ActivationOffload:
    """Moves the activations of a model away between forward and backward.

    Args:
        model: whose parameters and buffers stay.
        device: where its activations are; tensors on others are left alone.
        min_bytes: smaller storages stay.
        folder: for the file, where the device is a CPU; by default the system's folder for temporary files.
        max_host_bytes: so much may be away at a time, in the file or in host memory; beyond it, tensors stay.

    Raises:
        ValueError: the folder cannot be written to or is in memory, or the device is neither a CPU nor a CUDA device.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        min_bytes: int = MIN_BYTES,
        folder: str | Path | None = None,
        max_host_bytes: int | None = None,
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"activations can be offloaded from a CPU or a CUDA device, not from {device}")
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.model, self.device, self.min_bytes, self.max_host_bytes = model, device, min_bytes, max_host_bytes
        if isinstance(next(model.parameters(), None), FakeTensor):
            self.store: Store = Nowhere()
        else:
            self.store = SpillFile(folder) if device.type == "cpu" else PinnedHost(device)
        self._away: weakref.WeakValueDictionary[tuple[int, int], _Offloaded] = weakref.WeakValueDictionary()
        """By storage and version. An entry keeps its storage's address from being reused, and dies with the graph."""
        self.unwanted: deque[Any] = deque()
        """Copies that nobody wants. Whichever thread frees a graph adds to it; `settle` takes them out."""
        self._held: frozenset[int] = frozenset()
        self._bytes = self._peak = 0

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """For the forward of a micro-batch; its backward may run inside or, with nothing to enter, after it."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *gathered_weights(self.model)]
        self._held = frozenset(storage for tensor in tensors for storage in _storages(tensor))
        before = _around.set(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.hold, _unpack):
                yield
        finally:
            _around.reset(before)

    def hold(self, tensor: Tensor) -> Held:
        """What stands for a tensor until backward."""
        offloaded = self._offloaded(tensor) if self._is_worth_it(tensor) else None
        if offloaded is None:
            return Stayed.as_it_is(tensor)
        return Away(offloaded, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are away now."""
        self.settle()
        return self._bytes

    @property
    def peak_offloaded_bytes(self) -> int:
        """The most bytes that have been away at a time."""
        return self._peak

    def _is_worth_it(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, FakeTensor) or tensor.device != self.device or tensor.layout != torch.strided:
            return False
        base = base_of(tensor)
        if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
            return False
        if not (tensor.dtype.is_floating_point or tensor.dtype in (torch.bool, torch.uint8)) or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self.min_bytes and storage_id(storage) not in self._held and not is_in_backward()

    def _offloaded(self, tensor: Tensor) -> _Offloaded | None:
        """The tensor's storage, moved away unless it is already; None if there is no room."""
        storage = tensor.untyped_storage()
        key = storage_id(storage), version_of(tensor)
        known = self._away.get(key)
        if known is not None:
            return known
        self.settle()
        if self.max_host_bytes is not None and self._bytes + self.store.needs(storage.nbytes()) > self.max_host_bytes:
            return None
        offloaded = self._away[key] = _Offloaded(self, tensor)
        self._bytes += offloaded.stored.bytes
        self._peak = max(self._peak, self._bytes)
        return offloaded

    def settle(self) -> None:
        while self.unwanted:
            stored = self.unwanted.popleft()
            self._bytes -= stored.bytes
            self.store.free(stored)


class _Offloaded:
    """One storage that is away, until the first of its views is asked for; from then on it is held as ever."""

    stored: Any = None
    """Stands for the copy in the store, while there is one."""
    back: UntypedStorage | Tensor | None = None

    def __init__(self, owner: ActivationOffload, tensor: Tensor) -> None:
        self.owner, self.source = owner, StorageWeakRef(tensor.untyped_storage())
        self.stored = owner.store.put(tensor)

    def storage(self) -> UntypedStorage | Tensor:
        if self.back is None:
            self.back = self.owner.store.get(self.stored)
            self._forget()
            self.owner.settle()
        return self.back

    def _forget(self) -> None:
        if self.stored is not None:
            self.owner.unwanted.append(self.stored)
            self.stored = None

    __del__ = _forget


class Away(NamedTuple):
    """A tensor whose storage is away."""

    offloaded: _Offloaded
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """It, brought back."""
        storage = self.offloaded.storage()
        if isinstance(storage, Tensor):
            return storage.view(self.dtype).as_strided(self.size, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=self.offloaded.owner.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]


class ChangedInPlace(RuntimeError, ValueError):
    """A model changes what backward needs, so that it does not go with what kept it: a plan leaves that out."""


class Stayed(NamedTuple):
    """A saved tensor that stayed. The hooks take autograd's own check for changes in place away, so it is made here."""

    detached: Tensor
    version: int

    @classmethod
    def as_it_is(cls, tensor: Tensor) -> Stayed:
        return cls(tensor.detach(), version_of(tensor))

    def tensor(self) -> Tensor:
        """It, unless it was changed."""
        if version_of(self.detached) != self.version:
            raise ChangedInPlace(
                f"a tensor {list(self.detached.shape)} that backward needs was changed in place after forward "
                f"(version {version_of(self.detached)} instead of {self.version})"
            )
        return self.detached


Held = Away | Stayed


def _unpack(held: Held) -> Tensor:
    return held.tensor()


def _storages(tensor: Tensor) -> Iterator[int]:
    """The storages of a tensor, those inside a wrapper (a sharded or quantized one) included."""
    if is_traceable_wrapper_subclass(tensor):
        for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(inner, Tensor):  # a sharded one also names its ranks
                yield from _storages(inner)
    elif tensor.layout == torch.strided:
        yield storage_id(tensor.untyped_storage())
