"""Counts the bytes that tensors really hold while a step runs, by phase: what sharding's formulas are held against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowtide.compat.torch import parts_of
from lowtide.planner.tracing.storage_watch import StorageWatch


class LivingBytes(StorageWatch[None], TorchDispatchMode):
    """Sizes are read anew after each operation: `fully_shard` empties and fills storages without one.

    Attributes:
        phase: set by whoever runs the code; nothing is counted in the phase "".
        peaks: the most bytes of each phase.
        states: for each phase the bytes of weights, gradients and optimizer states at its peak, of what was named.
        most_in_layers: the most bytes of all else in the phase "layers".
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self.states: dict[str, dict[str, int]] = {}
        self.most_in_layers = 0
        self.model: torch.nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        self._count()
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, (args, kwargs, out))
        self._count()
        return out

    def _see(self, tensor: Tensor) -> None:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if storage.device.type == "cpu" and not self.follows(storage):
                self.follow(storage, None)

    def freed(self, block: None) -> None:
        """It is among the living no more."""

    def living(self) -> int:
        """The bytes there are now."""
        return sum(storage.nbytes() for storage in self.storages())

    def rest(self) -> int:
        """Those that are no states."""
        return self.living() - sum(self._states().values())

    def _count(self) -> None:
        total = self.living()
        if self.phase and total > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = total
            self.states[self.phase] = self._states()
        if self.phase == "layers":
            self.most_in_layers = max(self.most_in_layers, total - sum(self._states().values()))

    def _states(self) -> dict[str, int]:
        if self.model is None:
            return {}
        parameters = list(self.model.parameters())
        states = self.optimizer.state.values() if self.optimizer else ()
        return {
            "weights": _bytes([*parameters, *self.model.buffers()]),
            "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer": _bytes(value for state in states for value in state.values()),
        }

    def by_category(self) -> dict[str, dict[str, int]]:
        """As a trace has it: what is not a state is activations."""
        return {
            phase: {**states, "activations": self.peaks[phase] - sum(states.values())}
            for phase, states in self.states.items()
        }


def _bytes(tensors: Any) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
