"""Replaced-token detection (ELECTRA, arXiv 2003.10555): which tokens of a text a generator put there."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def detection_nll(
    logits: Float[Tensor, " positions"], replaced: Bool[Tensor, " positions"]
) -> Float[Tensor, " positions"]:
    """-log sigmoid(logit) where a token was replaced, -log sigmoid(-logit) elsewhere."""
    return F.binary_cross_entropy_with_logits(logits, replaced.to(logits.dtype), reduction="none")
