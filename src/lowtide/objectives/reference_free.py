"""Preference losses without a reference: ORPO's odds ratio, CPO's contrast, SimPO, and TPO's.

Each from the log-probabilities of the two completions, [pairs] each, to [pairs]; summed over tokens, or a mean over
them, as the method says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lowtide.objectives.named import LossTable


class Settings(Protocol):
    """The options that the losses read."""

    beta: float
    label_smoothing: float


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Float[Tensor, " pairs"]:
    """log(odds(chosen) / odds(rejected)), odds(p) = p / (1 - p), from mean log-probs a token (arXiv 2403.07691)."""
    return (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, each side of -log 2 by the form that keeps its digits (Maechler 2012).

    A branch that is not taken gets an input that is safe for it, so that its gradient is no NaN.
    """
    far = x < -math.log(2)
    return torch.where(
        far,
        torch.log1p(-torch.exp(torch.where(far, x, -1.0))),
        torch.log(-torch.expm1(torch.where(far, -0.5, x))),
    )


def alpha_reward(logps: Tensor, alpha: float) -> Tensor:
    """AlphaPO's reward (1 - p^-alpha) / alpha, log p in the limit alpha = 0 (arXiv 2501.03884)."""
    return logps if alpha == 0 else (1 - torch.exp(-alpha * logps)) / alpha


def _smoothed(margin: Tensor, settings: Settings) -> Tensor:
    smoothing = settings.label_smoothing
    return -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing


def sigmoid(contrast: Tensor, settings: Settings) -> Float[Tensor, " pairs"]:
    """CPO (arXiv 2401.08417, equation 3), with smoothed labels."""
    return _smoothed(settings.beta * contrast, settings)


def targeted(contrast: Tensor, settings: Settings, *, gamma: str) -> Float[Tensor, " pairs"]:
    """SimPO: the contrast of means a token, less the target margin gamma / beta (arXiv 2405.14734, equation 6).

    Args:
        gamma: the option that gamma is.
    """
    return sigmoid(contrast - getattr(settings, gamma) / settings.beta, settings)


def hinge(contrast: Tensor, settings: Settings) -> Float[Tensor, " pairs"]:
    """SLiC's hinge (arXiv 2305.10425)."""
    return torch.relu(1 - settings.beta * contrast)


def ipo(contrast: Tensor, settings: Settings) -> Float[Tensor, " pairs"]:
    """IPO's squared distance (arXiv 2310.12036), on means a token."""
    return (contrast - 1 / (2 * settings.beta)) ** 2


@dataclass(frozen=True)
class ContrastLoss:
    """A variant of the `loss_type` of CPO and TPO."""

    fn: Callable[[Tensor, Settings], Tensor]
    """From the chosen log-probability (or reward) less the rejected one, [pairs], to the loss of each, [pairs]."""
    reads: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The options that it reads beside `beta`; another that is set would be without effect."""
    per_token: bool = field(default=False, kw_only=True)
    """Log-probabilities are means over a completion's tokens, in place of sums."""
    divides_by_beta: bool = field(default=False, kw_only=True)


def _targeted(gamma: str) -> ContrastLoss:
    return ContrastLoss(
        functools.partial(targeted, gamma=gamma),
        reads=frozenset({"label_smoothing", gamma}),
        per_token=True,
        divides_by_beta=True,
    )


LOSSES = LossTable(
    {
        "sigmoid": ContrastLoss(sigmoid, reads=frozenset({"label_smoothing"})),
        "hinge": ContrastLoss(hinge),
        "ipo": ContrastLoss(ipo, per_token=True, divides_by_beta=True),
        "simpo": _targeted("simpo_gamma"),
    },
    lambda contrast: contrast,
    ContrastLoss,
)
"""The variants of CPO's `loss_type`."""
TPO_LOSSES = LossTable(
    {
        **{name: LOSSES[name] for name in ("sigmoid", "hinge", "ipo")},
        "tpo-l": _targeted("tpo_l_gamma"),
    },
    lambda contrast: contrast,
    ContrastLoss,
)
"""The variants of TPO's `loss_type`."""
