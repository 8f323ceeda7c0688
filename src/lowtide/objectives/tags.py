"""The loss of token classification: cross-entropy of labels, weighted by class."""

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
