"""Metrics that micro-batches and ranks add up: means as sums and counts, smallest and largest values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.engine.heads.head import ScoreOutput
from lowtide.objectives.outcome import Mean, Outcome
from lowtide.ops.float64 import float64_device, to_float64
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import objects_of_all_ranks


@dataclass
class Totals:
    """What has been added up since the last reading: what is of the device there, and what the host knows as floats."""

    sums: dict[str, Any] = field(default_factory=dict)
    means: dict[str, Mean] = field(default_factory=dict)
    lows: dict[str, Tensor] = field(default_factory=dict)
    highs: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor | float) -> None:
        """Adds to sums."""
        for name, value in values.items():
            _fold(self.sums, name, value, operator.add)

    def add_mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Adds a sum of `count` values to a mean."""
        added, before = Mean(_number(total), _number(count)), self.means.get(name)
        if before is not None:
            added = Mean(before.total + added.total, before.count + added.count)
        self.means[name] = added

    def count(self, batch: RaggedBatch) -> None:
        """Adds the tokens of a whole batch, of which the number does not depend on how the batch is cut and run."""
        self.add(tokens=batch.repeated_tokens, scores=batch.scores)

    def take_in(self, output: ScoreOutput, batch: RaggedBatch) -> None:
        """What one micro-batch adds to the metrics; one without scores adds nothing."""
        if batch.scores == 0:
            return
        if "entropies" in output.stats:
            self.add_mean("entropy", output.stats["entropies"].sum(), batch.scores)
        if output.aux_loss is not None:
            self.add_mean("aux_loss", output.aux_loss * batch.tokens, batch.tokens)
        if output.loss is not None and "top1" in output.stats:
            self.add_mean("mean_token_accuracy", output.stats["top1"].sum(), batch.scores)

    def take_outcome(self, outcome: Outcome) -> None:
        """The metrics that an objective over rows found."""
        self.take_over(Totals({}, {**outcome.means}, {**outcome.lows}, {**outcome.highs}))

    def take_over(self, other: Totals) -> None:
        """What was added up elsewhere."""
        for mine, theirs, join in (
            (self.sums, other.sums, operator.add),
            (self.lows, other.lows, torch.minimum),
            (self.highs, other.highs, torch.maximum),
        ):
            for name, value in theirs.items():
                _fold(mine, name, value, join)
        for name, mean in other.means.items():
            self.add_mean(name, *mean)

    def read(self, device: torch.device) -> dict[str, float]:
        """Sums, means, smallest and largest values over all ranks, by name; those of nothing are left out."""
        joined = Totals()
        for each in objects_of_all_ranks(self._on_host(device)):  # which need not have added to the same names
            joined.take_over(each)
        found = {name: float(value) for name, value in joined.sums.items()}
        ends = {name: value.item() for name, value in (joined.lows | joined.highs).items()}
        found |= {name: value for name, value in ends.items() if not math.isinf(value)}
        return found | {name: float(total / count) for name, (total, count) in joined.means.items() if count}

    def _on_host(self, device: torch.device) -> Totals:
        device = float64_device(device)
        totals = _moved({name: mean.total for name, mean in self.means.items()}, device)
        counts = _moved({name: mean.count for name, mean in self.means.items()}, device)
        means = {name: Mean(total, counts[name]) for name, total in totals.items()}
        return Totals(_moved(self.sums, device), means, _moved(self.lows, device), _moved(self.highs, device))


def _number(value: Tensor | float) -> Any:
    return to_float64(value.detach()) if isinstance(value, Tensor) else float(value)


def _fold(held: dict[str, Any], name: str, value: Tensor | float, join: Callable[..., Any]) -> None:
    value, before = _number(value), held.get(name)
    held[name] = value if before is None else join(before, value)


def _moved(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The same as tensors in host memory, at once."""
    if not values:
        return {}
    names = sorted(values)
    stacked = torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in names])
    return dict(zip(names, stacked.cpu().unbind(), strict=True))
