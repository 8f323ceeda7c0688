"""Counts the bytes that tensors hold on a CPU while code runs, those of weights that are gathered and freed too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowtide.compat.torch import TorchDispatchMode, parts_of, tree_leaves
from lowtide.planner.tracing.storage_watch import StorageWatch


class LivingBytes(StorageWatch[None], TorchDispatchMode):
    """Sizes are read anew after each operation: `fully_shard` empties and fills storages without one.

    What a kernel or gloo takes inside of an operation is not seen.

    Attributes:
        peak: the most bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = (each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor))
        for storage in (part.untyped_storage() for tensor in tensors for part in parts_of(tensor)):
            if storage.device.type == "cpu" and not self.follows(storage):
                self.follow(storage, None)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages()))
        return out

    def freed(self, block: None) -> None:
        """It is among the living no more."""
