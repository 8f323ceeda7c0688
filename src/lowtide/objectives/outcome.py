"""What a loss over rows returns: the loss, and the sums behind its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor

from lowtide.ops.float64 import to_float64


class Mean(NamedTuple):
    """A mean that is still a sum and a count, so that micro-batches and ranks add up exactly."""

    total: Tensor
    count: Tensor | float


@dataclass(frozen=True)
class Outcome:
    """The loss of some rows."""

    loss: Float[Tensor, ""]
    """Their part of the batch's loss: a sum over rows, over denominators that were counted for the whole batch."""
    means: Mapping[str, Mean] = field(default_factory=dict)
    """Metrics that are means, without gradient."""
    lows: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics that are a smallest value; likewise `highs`."""
    highs: Mapping[str, Tensor] = field(default_factory=dict)


Counts: TypeAlias = "Mapping[str, float]"
"""What was counted over the whole batch of an optimizer step and over all ranks, by name."""


def mean_of(values: Tensor, counted: Tensor | None = None) -> Mean:
    """The mean of some values, one a row, or of those among them that are counted."""
    values = to_float64(values.detach())
    if counted is None:
        return Mean(values.sum(), float(values.numel()))
    return Mean(values.masked_fill(~counted, 0).sum(), to_float64(counted.sum()))
