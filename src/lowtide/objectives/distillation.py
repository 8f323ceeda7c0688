"""Distillation: the loss of a token is how far the student's distribution of it is from the teacher's."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lowtide.ops.logits.linear_logprobs import ScoreLoss, TokenStats


def divergence(stats: TokenStats) -> Float[Tensor, " scores"]:
    """Generalized Jensen-Shannon divergence (arXiv 2306.13649, equation 1; see `ops.logits.compared_rows`)."""
    assert stats.divergences is not None, "distillation wants divergences"
    return stats.divergences


def weighed(weight: float) -> ScoreLoss:
    """So many times the distance from a teacher, of the same vocabulary or another."""
    return lambda stats: divergence(stats) * weight
