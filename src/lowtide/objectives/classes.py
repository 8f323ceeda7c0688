"""The losses of classifiers, of tokens and of texts: cross-entropy of labels, weighted by class; of labels that each
hold or do not; and squared errors."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def label_nll(
    logits: Float[Tensor, "scores labels"],
    target: Int[Tensor, " scores"],
    weights: Float[Tensor, " labels"] | None = None,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """The sum over scores of w[target] times -log p(target).

    Args:
        weights: w, of each label; 1 if None.
        smoothing: share s of the uniform distribution in each target (arXiv 1512.00567, section 7): the sum is
            (1 - s) w[target] (-log p(target)) + s / labels * sum over labels c of w[c] (-log p(c)).
    """
    return F.cross_entropy(logits, target, weights, reduction="sum", label_smoothing=smoothing)


def binary_nll(
    logits: Float[Tensor, "scores labels"],
    target: Float[Tensor, "scores labels"],
    weights: Float[Tensor, " labels"] | None = None,
) -> Float[Tensor, ""]:
    """The sum over scores and labels c of w[c] times -log sigmoid(logit) where c holds, -log sigmoid(-logit) elsewhere.

    Args:
        target: 1 where a label holds, 0 elsewhere.
        weights: w, of each label; 1 if None.
    """
    return F.binary_cross_entropy_with_logits(logits, target, weights, reduction="sum")


def squared_errors(values: Float[Tensor, "scores values"], target: Float[Tensor, "scores values"]) -> Float[Tensor, ""]:
    """The sum of the squared differences."""
    return F.mse_loss(values, target, reduction="sum")
