"""Counts the bytes that tensors hold on a CPU while code runs, those of weights that are gathered and freed too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from lowtide.compat.torch import TorchDispatchMode, storage_id
from lowtide.planner.tracing.storage_watch import parts_of


class LivingBytes(TorchDispatchMode):
    """Sizes are read anew after each operation: `fully_shard` empties and fills storages without one.

    What a kernel or gloo takes inside of an operation is not seen.

    Attributes:
        peak: the most bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors([*args, *(kwargs or {}).values(), out]):
            for part in parts_of(tensor):
                if isinstance(part, Tensor):  # a DTensor has its mesh among them
                    self._see(part)
        self.peak = max(self.peak, self._living())
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage_id(storage))
        if storage.device.type == "cpu" and (known is None or known() is None):
            self._storages[storage_id(storage)] = weakref.ref(storage)

    def _living(self) -> int:
        total = 0
        for key, known in list(self._storages.items()):
            storage = known()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and the lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
