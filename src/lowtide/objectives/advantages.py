"""Rewards to advantages: by how much a completion is better than others of its prompt.

Rewards that are NaN are of completions that nothing scored: they count in no mean, and their advantage is 0.
Shapes: `completions` in groups of `size` that stand together, `functions` that reward them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TINY = 1e-4
"""Added to a standard deviation before it divides."""


@dataclass(frozen=True)
class Advantages:
    """What a batch of groups comes to."""

    values: Float[Tensor, " completions"]
    without_spread: Bool[Tensor, " any"]
    """Which groups, or rewards, are all the same: there is nothing to learn from these."""


def weighted(
    rewards: Float[Tensor, "completions functions"], weights: Float[Tensor, " functions"]
) -> Float[Tensor, " completions"]:
    """The weighted sum of the rewards of each; NaN where nothing scored it."""
    total = (rewards * weights.to(rewards)).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), torch.nan)


def deviation(values: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The standard deviation over what is not NaN, with one degree of freedom less; 0 of a single value."""
    known = ~values.isnan()
    count = known.sum() if dim is None else known.sum(dim, keepdim=True)
    mean = values.nanmean() if dim is None else values.nanmean(dim, keepdim=True)
    squares = ((values - mean) ** 2).nansum() if dim is None else ((values - mean) ** 2).nansum(dim, keepdim=True)
    found = torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), torch.zeros_like(squares))
    return found if keepdim or dim is None else found.squeeze(dim)


def relative_to_group(
    rewards: Float[Tensor, "completions functions"],
    weights: Float[Tensor, " functions"],
    size: int,
    *,
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
) -> Advantages:
    """Rewards less the mean of the group, over a standard deviation (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        scale: the deviation is that of the "group", of the whole "batch" (arXiv 2508.08221), or "none" divides
            (arXiv 2503.20783).
        aggregation: whether rewards of several functions are added up first ("sum_then_normalize"), or each is
            normalized within its group ("normalize_then_sum"; GDPO, arXiv 2601.05242).
    """
    if aggregation == "normalize_then_sum":
        groups = rewards.view(-1, size, rewards.shape[1])
        normal = (groups - groups.nanmean(1, keepdim=True)) / (deviation(groups, 1, keepdim=True) + TINY)
        total = weighted(normal.reshape(rewards.shape), weights)
        total = total.masked_fill(rewards.isnan().all(1), torch.nan)
        spread = deviation(total).expand_as(total)
        return _found((total - total.nanmean()) / (spread + TINY), spread)
    total = weighted(rewards, weights)
    groups = total.view(-1, size)
    means = groups.nanmean(1).repeat_interleave(size)
    spread = deviation(groups, 1).repeat_interleave(size) if scale != "batch" else deviation(total).expand_as(total)
    return _found((total - means) if scale == "none" else (total - means) / (spread + TINY), spread)


def leave_one_out(total: Float[Tensor, " completions"], size: int, *, normalize: bool = False) -> Advantages:
    """Rewards less the mean of the others of the group (RLOO, arXiv 2402.14740, equation 8).

    Args:
        normalize: to a mean of 0 and a deviation of 1 over the batch.
    """
    groups = total.view(-1, size)
    others = (groups.nansum(1, keepdim=True) - groups) / ((~groups.isnan()).sum(1, keepdim=True) - 1)
    values = total - others.view(-1) if size > 1 else torch.zeros_like(total)
    if normalize:
        values = (values - values.nanmean()) / (deviation(values) + TINY)
    return _found(values, deviation(groups, 1))


def _found(values: Tensor, spread: Tensor) -> Advantages:
    return Advantages(values.nan_to_num(nan=0.0), torch.isclose(spread, torch.zeros_like(spread)))
