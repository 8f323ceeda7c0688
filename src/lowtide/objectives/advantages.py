"""Rewards to advantages: by how much a completion is better than others of its prompt.

Rewards that are NaN are of completions that nothing scored: they count in no mean, and their advantage is 0.
Advantages do not depend on where 0 is. So each is computed from how far a reward is above the smallest one of its group
(`above_smallest`): equal rewards are exactly 0 there, and their advantages too, whatever divides them later. All of it
is in float64.
Shapes: `completions` in groups of `size` that stand together, `functions` that reward them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TINY = 1e-4
"""Added to a standard deviation before it divides."""
ROUNDING = 2.0**-40
"""Rewards are equal if they differ by less than this share of what was added up to them: float64 sums of thousands of
terms are as exact."""


@dataclass(frozen=True)
class Advantages:
    """What a batch of groups comes to."""

    values: Float[Tensor, " completions"]
    without_spread: Bool[Tensor, " groups"]
    """Whether all known rewards of a group are the same: there is nothing to learn from it."""
    steps: Float[Tensor, " steps"] | None = None
    """What rewards at several places of completions add to the tokens before them (`objectives.step_rewards`)."""


def weighted(
    rewards: Float[Tensor, "completions functions"], weights: Float[Tensor, " functions"]
) -> Float[Tensor, " completions"]:
    """The weighted sum of the rewards of each, in float64; NaN where nothing scored it."""
    total = (rewards.double() * weights.double()).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), torch.nan)


def summed_up(
    rewards: Float[Tensor, "completions functions"], weights: Float[Tensor, " functions"]
) -> Float[Tensor, " completions"]:
    """How large the terms of `weighted` are together, their signs aside: what its rounding is in proportion to."""
    return (rewards.double() * weights.double()).abs().nansum(1)


def above_smallest(
    values: Float[Tensor, "groups size"], magnitude: Float[Tensor, "groups size"] | None = None
) -> Float[Tensor, "groups size"]:
    """How far each value is above the smallest known one of its group, in float64: exactly 0 for equal values, and for
    those that differ by their rounding alone.

    Args:
        magnitude: of what was added up to each value; None where that is the value itself.
    """
    magnitude = values.abs() if magnitude is None else magnitude
    known = values.double().masked_fill(values.isnan(), math.inf)
    above = values.double() - known.amin(1, keepdim=True)
    rounding = ROUNDING * magnitude.double().nan_to_num(nan=0.0).amax(1, keepdim=True)
    return above.masked_fill(above <= rounding, 0.0)


def deviation(
    values: Float[Tensor, "groups size"], magnitude: Float[Tensor, "groups size"] | None = None
) -> Float[Tensor, "groups 1"]:
    """The standard deviation of each group over what is not NaN, with one degree of freedom less; exactly 0 of equal
    values, and of a single one."""
    above = above_smallest(values, magnitude)
    count = (~above.isnan()).sum(1, keepdim=True)
    squares = ((above - above.nanmean(1, keepdim=True)) ** 2).nansum(1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


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
        columns = rewards.double().T.reshape(-1, size)
        rewards = (_centred(columns) / (deviation(columns) + TINY)).view(len(weights), -1).T
        scale = "batch"
    total, magnitude = weighted(rewards, weights).view(-1, size), summed_up(rewards, weights).view(-1, size)
    values = _centred(total, magnitude)
    if scale == "batch":
        values = values / (deviation(total.view(1, -1), magnitude.view(1, -1)) + TINY)
    elif scale == "group":
        values = values / (deviation(total, magnitude) + TINY)
    return _found(values, above_smallest(total, magnitude))


def leave_one_out(
    total: Float[Tensor, " completions"],
    size: int,
    *,
    magnitude: Float[Tensor, " completions"] | None = None,
    normalize: bool = False,
) -> Advantages:
    """Rewards less the mean of the others of the group (RLOO, arXiv 2402.14740, equation 8).

    Args:
        magnitude: of what was added up to each; None where that is the total itself.
        normalize: to a deviation of 1 over the batch; their mean is 0, within each group already.
    """
    groups = total.view(-1, size)
    above = above_smallest(groups, None if magnitude is None else magnitude.view(-1, size))
    others = (above.nansum(1, keepdim=True) - above) / ((~above.isnan()).sum(1, keepdim=True) - 1)
    values = above - others if size > 1 else torch.zeros_like(above)
    if normalize:
        values = values / (deviation(values.view(1, -1)) + TINY)
    return _found(values, above)


def optimal_values(rewards: Float[Tensor, "prompts completions"], beta: float) -> Float[Tensor, " prompts"]:
    """beta log mean exp(reward / beta), the value of the best policy at KL weight beta, estimated of what the reference
    wrote (arXiv 2505.20686, equation 4), in float64; NaN where no reward is known.

    Args:
        rewards: NaN where nothing rewards a completion.
    """
    scaled = rewards.double() / beta
    known = ~scaled.isnan()
    total = scaled.masked_fill(~known, -math.inf).logsumexp(1)
    return (beta * (total - known.sum(1).double().log())).masked_fill(~known.any(1), math.nan)


def _centred(
    values: Float[Tensor, "groups size"], magnitude: Float[Tensor, "groups size"] | None = None
) -> Float[Tensor, "groups size"]:
    """Values less the mean of the known ones of their group."""
    above = above_smallest(values, magnitude)
    return above - above.nanmean(1, keepdim=True)


def _found(values: Float[Tensor, "groups size"], above: Float[Tensor, "groups size"]) -> Advantages:
    return Advantages(values.reshape(-1).nan_to_num(nan=0.0), (above.nan_to_num(nan=0.0) == 0).all(1))
