"""Watches storages being born and freed while code runs on fake tensors, which have shapes and no memory.

The step that is traced is the one that trains; nothing here knows what it does. So a technique or a method is covered
the day it is written, and there are no formulas to keep in step with the code.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

PHASES = ("loading", "forward", "head", "backward", "optimizer")
BORN_IN = {
    "loading": "weights",
    "forward": "activations",
    "head": "head",
    "backward": "activations",
    "optimizer": "optimizer",
}
"""The category of what is made in a phase; gradients and references are told by what they become."""


class StorageTrace(TorchDispatchMode):
    """Counts the bytes of living storages by category, and keeps the most of each phase.

    Attributes:
        phase: set by whoever runs the code.
        peaks: for each phase the bytes by category when it held most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "loading"
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self._category: dict[int, str] = {}
        self._bytes: dict[int, int] = {}
        self._owner: str | None = None

    @property
    def total(self) -> int:
        """Bytes of all living storages."""
        return sum(self.live.values())

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase, after which the one before goes on."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def owned_by(self, category: str) -> Iterator[None]:
        """While it lasts, what is made is of a category, whatever the phase."""
        before, self._owner = self._owner, category
        try:
            yield
        finally:
            self._owner = before

    def belongs(self, tensors: Iterable[Tensor], category: str) -> None:
        """Says what some tensors are."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._category and self._category[key] != category:
                self.live[self._category[key]] -= self._bytes[key]
                self._category[key] = category
                self.live[category] += self._bytes[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0  # where the step reads a number off a tensor that has none
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, out)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._category:
            return
        category = self._owner or BORN_IN[self.phase]
        self._category[key], self._bytes[key] = category, storage.nbytes()
        self.live[category] += self._bytes[key]
        weakref.finalize(storage, self._gone, key)
        if self.total > sum(self.peaks.get(self.phase, Counter()).values()):
            self.peaks[self.phase] = Counter(self.live)

    def _gone(self, key: int) -> None:
        self.live[self._category.pop(key)] -= self._bytes.pop(key)
