"""Corrects for a generator that draws from other numbers than the policy is scored by: truncated and masked importance
sampling (arXiv 2510.18927, and https://fengyao.notion.site/off-policy-rl for the mismatch of engines).

The ratio is that of the policy which wrote a token, as the trained model scores it, against what the generator says
that it drew the token with. Shapes: `scores` tokens that the policy wrote, `completions` that they are of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.objectives.policy_gradient import FARTHEST, SMALLEST

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""Ratios of tokens, or of whole completions (the product of those of their tokens), which are cut at the bounds, or are
0 where they lie beyond them."""


@dataclass(frozen=True)
class Correction:
    """What a batch of completions is corrected by."""

    ratios: Float[Tensor, " scores"]
    """What the loss of each token is multiplied by."""
    distinct: Float[Tensor, " ratios"]
    """The ratios as they were formed: one a token, or one a completion that has tokens to learn from."""
    logs: Float[Tensor, " completions"]
    """The log of the ratio of each completion: the sum of those of its tokens, where they were formed for tokens."""
    distances: Float[Tensor, " known"]
    """How far apart the two numbers of a token are, in nats, of the tokens that the generator gave a number for."""


@torch.no_grad()
def correction(
    old: Float[Tensor, " scores"],
    sampled: Float[Tensor, " scores"],
    completion: Int[Tensor, " scores"],
    completions: int,
    *,
    mode: str,
    least: float | None = None,
    most: float | None = None,
) -> Correction:
    """Importance ratios of tokens that a generator drew.

    Args:
        old: log-probabilities of the policy that wrote the tokens, as the trained model scores them.
        sampled: those that the generator drew them with; NaN where it gives none, whose ratio is 1.
        completion: the completion of each token.
        completions: how many there are; one without tokens has a ratio of 1.
        mode: of `MODES`.
        least: the smallest ratio; None for no bound.
        most: the largest.
    """
    assert mode in MODES, mode
    distances = (old - sampled).abs()
    logs = torch.nan_to_num(old - sampled, nan=0.0)
    of_sequences = mode.startswith("sequence")
    if of_sequences:
        logs = logs.new_zeros(completions).index_add(0, completion, logs)
    ratios = torch.exp(logs)
    if mode.endswith("truncate"):
        ratios = ratios if least is most is None else ratios.clamp(least, most)
    else:
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        ratios = ratios.masked_fill((ratios < low) | (ratios > high), 0.0)
    bounded = ratios.log().clamp(SMALLEST, FARTHEST)
    if of_sequences:
        distinct = ratios[completion.unique()]
        return Correction(ratios[completion], distinct, bounded, distances[~distances.isnan()])
    summed = bounded.new_zeros(completions).index_add(0, completion, bounded)
    return Correction(ratios, ratios, summed, distances[~distances.isnan()])


def sampling_metrics(found: Correction, over_ranks: Any = lambda values: values) -> dict[str, float]:
    """How far the generator is from the policy, under TRL's names.

    Args:
        over_ranks: from numbers [5 or so] of this rank to those of all, one after the other.
    """
    distances, ratios = found.distances, found.distinct
    own = torch.stack(
        [
            distances.sum(),
            distances.new_tensor(float(distances.numel())),
            distances.max() if distances.numel() else distances.new_zeros(()),
            ratios.sum(),
            ratios.new_tensor(float(ratios.numel())),
            ratios.min() if ratios.numel() else ratios.new_tensor(math.inf),
            ratios.max() if ratios.numel() else ratios.new_zeros(()),
        ]
    ).float()
    ranks = over_ranks(own).view(-1, len(own)).cpu()
    total, count, _, ratio_total, ratio_count, _, _ = ranks.sum(0).tolist()
    lowest = ranks[:, 5].min().item()
    return {
        "sampling/sampling_logp_difference/mean": total / max(count, 1),
        "sampling/sampling_logp_difference/max": ranks[:, 2].max().item(),
        "sampling/importance_sampling_ratio/min": lowest if math.isfinite(lowest) else 0.0,
        "sampling/importance_sampling_ratio/mean": ratio_total / max(ratio_count, 1),
        "sampling/importance_sampling_ratio/max": ranks[:, 6].max().item(),
    }
