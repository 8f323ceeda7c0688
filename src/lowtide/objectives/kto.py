"""Losses over single completions that are desirable or not: KTO and BCO, and APO's unpaired form.

One function a variant, from `Unpaired` and the options to [rows]; nothing here knows of batches or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.objectives.named import LossTable


@dataclass(frozen=True)
class Unpaired:
    """What is known of some rows. All [rows], log-probabilities in nats and summed over a completion's tokens."""

    policy: Float[Tensor, " rows"]
    reference: Float[Tensor, " rows"]
    desirable: Bool[Tensor, " rows"]
    shift: Float[Tensor, " rows"] | None = None
    """What a row's reward is compared with, for the losses that have such a baseline; the same for all rows."""

    def shifted_by(self, shift: float) -> Unpaired:
        """The rows with a baseline."""
        return replace(self, shift=torch.full_like(self.policy, shift))

    @property
    def ratio(self) -> Tensor:
        return self.policy - self.reference

    @property
    def sign(self) -> Tensor:
        """1 for a desirable row, -1 for the others."""
        return self.desirable.to(self.policy.dtype) * 2 - 1


class Settings(Protocol):
    """The options that the losses read."""

    beta: float


def kto(rows: Unpaired, settings: Settings) -> Float[Tensor, " rows"]:
    """Prospect-theoretic value of the log-ratio against `rows.shift`, the estimated KL to the reference
    (arXiv 2402.01306, equations 7 and 8)."""
    assert rows.shift is not None
    return torch.sigmoid(-settings.beta * rows.sign * (rows.ratio - rows.shift))


def apo_zero_unpaired(rows: Unpaired, settings: Settings) -> Float[Tensor, " rows"]:
    """The same with a baseline of zero (arXiv 2408.06266, equation 7, unpaired)."""
    return torch.sigmoid(-settings.beta * rows.sign * rows.ratio)


def bco(rows: Unpaired, settings: Settings) -> Float[Tensor, " rows"]:
    """Logistic classification of the reward beta * log-ratio against `rows.shift`, the running mean of rewards
    (arXiv 2404.04656, equation 11)."""
    assert rows.shift is not None
    return -F.logsigmoid(rows.sign * (settings.beta * rows.ratio - rows.shift))


@dataclass(frozen=True)
class UnpairedLoss:
    """A variant of KTO's `loss_type`."""

    fn: Callable[[Unpaired, Settings], Tensor]
    """From rows to the loss of each, [rows]."""
    baseline: bool = field(default=False, kw_only=True)
    """It reads `rows.shift`, the mean log-ratio of mismatched completions over the whole batch."""


LOSSES = LossTable(
    {"kto": UnpairedLoss(kto, baseline=True), "apo_zero_unpaired": UnpairedLoss(apo_zero_unpaired)},
    lambda rows: rows.policy,
    UnpairedLoss,
)
"""The variants of KTO's `loss_type`."""
