"""The largest largest_tensors tensors, for the report of a run that ran out of memory.

They are looked for while memory is exhausted, so nothing here may need much of it, and what is found is kept as text
and numbers. First come the variables of the frames that failed, which takes no memory to speak of. Once these are
cleared comes what the garbage collector knows, which is every tensor that Python holds: a list of all objects, some
megabytes. What autograd alone has saved is not among them.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import cast

import torch
from torch import Tensor, nn

from lowtide.compat.torch import FakeTensor, storage_id
from lowtide.memory.allocators.measure import bytes_text

KINDS = ("weight", "gradient", "tensor")
"""What a storage is called: the first of these that it was found as."""
DEPTH = 3
"""How deep variables are looked into: a list of tensors in an object is 3 deep."""
NO_ROOM = (MemoryError, SystemError)
"""What Python raises where its own allocations fail; a SystemError where C code forgot to say so."""


class LargestTensors:
    """The storages that were found on a device, by size.

    Args:
        device: tensors of other kinds of device do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._found: dict[int, tuple[int, int, str]] = {}
        """By storage: the index of its kind, its bytes, its dtype and shape."""

    def take_in_frames(self, trace: TracebackType | None) -> None:
        """What the variables of a traceback's frames hold; as much of it as memory allows."""
        with contextlib.suppress(*NO_ROOM):
            for frame, _ in traceback.walk_tb(trace):
                self._take_in(_tensors_in(list(frame.f_locals.values()), DEPTH))

    def take_in_living(self) -> None:
        """What Python holds; nothing where memory is too short for the list of it."""
        with contextlib.suppress(*NO_ROOM):
            # By its type alone: some objects warn when they are asked for their class.
            self._take_in(each for each in gc.get_objects() if issubclass(type(each), Tensor))

    def text(self, count: int = 5) -> tuple[str, ...]:
        """The largest kinds of tensors: how many, of what size, kind, dtype and shape."""
        kinds = Counter((size, f"{KINDS[kind]} {shape}") for kind, size, shape in self._found.values())
        largest = sorted(kinds.items(), key=lambda item: -item[0][0])[:count]
        return tuple(f"{f'{n} x ' if n > 1 else ''}{bytes_text(size)} {kind}" for (size, kind), n in largest if size)

    def _take_in(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            # Fake ones hold nothing, and sizes that a compiler has left open are no numbers.
            if issubclass(type(tensor), FakeTensor) or tensor.device.type != self.device.type:
                continue
            weight = isinstance(tensor, nn.Parameter)
            self._name(tensor, KINDS.index("weight" if weight else "tensor"))
            if weight and tensor.grad is not None:
                self._name(tensor.grad, KINDS.index("gradient"))

    def _name(self, tensor: Tensor, kind: int) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        known = self._found.get(key)
        if known is None or kind < known[0]:
            shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            self._found[key] = kind, storage.nbytes(), shape


def _tensors_in(values: Iterable[object], depth: int) -> Iterator[Tensor]:
    """Tensors among some objects, and in their lists, tuples and dicts, and in attributes of this package's objects."""
    for value in values:
        if issubclass(type(value), Tensor):
            yield cast(Tensor, value)
        elif depth > 1:
            yield from _tensors_in(_held_by(value), depth - 1)


def _held_by(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    ours = type(value).__module__.startswith("lowtide.") and not isinstance(value, nn.Module)
    return getattr(value, "__dict__", {}).values() if ours else ()
