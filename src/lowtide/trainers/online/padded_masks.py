"""Masks of tokens that scripts ask a trainer of TRL for, of padded tensors.

A step has no padding and asks for them elsewhere (`entropy.kept_tokens`, `objectives.policy_gradient.near_policy`), so
that to override them would change nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.trainers.online.entropy import of_all_ranks


def get_high_entropy_mask(
    trainer: Any, entropies: Float[Tensor, "rows longest"], mask: Tensor, threshold: float
) -> Bool[Tensor, "rows longest"]:
    """Which tokens that `mask` keeps are of at least the entropy that the share `threshold` of them is below.

    Tokens of all ranks are compared, which ask for it together.
    """
    kept = mask.bool()
    everyones = of_all_ranks(entropies[kept].float().cpu())
    if not len(everyones):
        return torch.zeros_like(kept)
    least = torch.quantile(everyones, threshold).to(entropies.device)
    return kept & (entropies >= least)


def get_off_policy_mask(
    advantages: Float[Tensor, "rows 1"],
    per_token_logps: Float[Tensor, "rows longest"],
    sampling_per_token_logps: Float[Tensor, "rows longest"],
    mask: Tensor,
    off_policy_threshold: float,
) -> Float[Tensor, "rows 1"]:
    """1 for completions that won, or that the policy is still near: the mean log-ratio of the generator against the
    policy, where it is known, is at most the threshold (arXiv 2512.02556, equation 9). Else 0."""
    kept = mask.bool()
    ratios = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(nan=0.0).masked_fill(~kept, 0.0)
    distance = ratios.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    return ((advantages >= 0) | (distance <= off_policy_threshold)).to(mask.dtype)


def check_not_overridden(trainer: type) -> None:
    """Refuses a subclass with masks of its own.

    Raises:
        ValueError: names the method, and what to override in its place.
    """
    for mask in (get_high_entropy_mask, get_off_policy_mask):
        name = mask.__name__
        if getattr(trainer, name) is not mask:
            raise ValueError(
                f"{trainer.__name__}.{name} would not be called, since a step has no padded tensors: override "
                "`make_objective`, which returns the loss of log-probs"
            )
