"""Losses over single completions that are desirable or not: KTO and BCO, and APO's unpaired form.

One function a variant, from `Unpaired` to [rows]; nothing here knows of batches or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Unpaired:
    """What is known of some rows. All [rows], log-probabilities in nats and summed over a completion's tokens."""

    policy: Float[Tensor, " rows"]
    reference: Float[Tensor, " rows"]
    desirable: Bool[Tensor, " rows"]

    @property
    def ratio(self) -> Tensor:
        return self.policy - self.reference

    @property
    def sign(self) -> Tensor:
        """1 for a desirable row, -1 for the others."""
        return self.desirable.to(self.policy.dtype) * 2 - 1


def kto(rows: Unpaired, beta: float, shift: Tensor | float) -> Float[Tensor, " rows"]:
    """Prospect-theoretic value of the log-ratio against the baseline `shift`, the estimated KL to the reference
    (arXiv 2402.01306, equations 7 and 8)."""
    return torch.sigmoid(-beta * rows.sign * (rows.ratio - shift))


def apo_zero_unpaired(rows: Unpaired, beta: float, shift: Tensor | float) -> Float[Tensor, " rows"]:
    """The same with a baseline of zero (arXiv 2408.06266, equation 7, unpaired)."""
    return torch.sigmoid(-beta * rows.sign * rows.ratio)


def bco(rows: Unpaired, beta: float, shift: Tensor | float) -> Float[Tensor, " rows"]:
    """Logistic classification of the reward beta * log-ratio against the running mean `shift` of rewards
    (arXiv 2404.04656, equation 11)."""
    return -F.logsigmoid(rows.sign * (beta * rows.ratio - shift))


UnpairedLoss = Callable[[Unpaired, float, "Tensor | float"], Tensor]

LOSSES: dict[str, UnpairedLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}
"""The variants of KTO's `loss_type`."""
