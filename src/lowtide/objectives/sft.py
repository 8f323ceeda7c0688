"""Supervised fine-tuning: the losses of a token, from what is known of it.

Each takes the statistics of some scores and returns a loss for each; nothing here knows of batches or models. Their
sum is divided by the number of scores in the whole batch of an optimizer step.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lowtide.objectives.named import LossTable
from lowtide.ops.logits.linear_logprobs import ScoreLoss, TokenStats


def nll(stats: TokenStats) -> Float[Tensor, " scores"]:
    """Negative log-likelihood, -log p."""
    return -stats.logprobs


def dft(stats: TokenStats) -> Float[Tensor, " scores"]:
    """Dynamic fine-tuning, -sg(p) log p: each token weighted by its own probability (arXiv 2508.05629)."""
    return -stats.logprobs * stats.logprobs.detach().exp()


def smoothed_nll(smoothing: float) -> ScoreLoss:
    """Negative log-likelihood of a target mixed with the uniform distribution (arXiv 1512.00567, section 7).

    Args:
        smoothing: share of the uniform distribution, between 0 and 1.
    """

    def loss(stats: TokenStats) -> Tensor:
        assert stats.mean_logprobs is not None, "label smoothing wants mean_logprobs"
        return -(1 - smoothing) * stats.logprobs - smoothing * stats.mean_logprobs

    return loss


LOSSES: LossTable[ScoreLoss] = LossTable({"nll": nll, "dft": dft}, lambda stats: stats.logprobs)
"""The variants of `loss_type`."""
