"""The loss of a reward model: chosen answers score above rejected ones (Bradley and Terry 1952; arXiv 2203.02155)."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    margin: Float[Tensor, " pairs"] | None = None,
    center: float | None = None,
) -> Float[Tensor, " pairs"]:
    """-log sigmoid(chosen - rejected - margin), plus `center` times the squared sum of the two rewards.

    Args:
        margin: by how much the chosen answer is to be better (arXiv 2307.09288, section 3.2.2).
        center: coefficient that keeps rewards around zero (arXiv 2312.09244, appendix A.1).
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    losses = -F.logsigmoid(difference)
    return losses if center is None else losses + center * (chosen + rejected) ** 2
