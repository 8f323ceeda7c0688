"""Preference losses without a reference: ORPO's odds ratio, CPO's contrast, and SimPO.

Each from the log-probabilities of the two completions, [pairs] each, to [pairs]; summed over tokens, or a mean over
them, as the method says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


class Settings(Protocol):
    """The options that the losses read."""

    beta: float
    label_smoothing: float
    simpo_gamma: float


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


def simpo(contrast: Tensor, settings: Settings) -> Float[Tensor, " pairs"]:
    """SimPO: the contrast of means a token, less the target margin gamma / beta (arXiv 2405.14734, equation 6)."""
    return _smoothed(settings.beta * (contrast - settings.simpo_gamma / settings.beta), settings)


def hinge(contrast: Tensor, settings: Settings) -> Float[Tensor, " pairs"]:
    """SLiC's hinge (arXiv 2305.10425)."""
    return torch.relu(1 - settings.beta * contrast)


def ipo(contrast: Tensor, settings: Settings) -> Float[Tensor, " pairs"]:
    """IPO's squared distance (arXiv 2310.12036), on means a token."""
    return (contrast - 1 / (2 * settings.beta)) ** 2


LOSSES: dict[str, Callable[[Tensor, Settings], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
}
"""The variants of CPO's `loss_type`, from the chosen log-probability (or reward) less the rejected one."""
PER_TOKEN = frozenset({"ipo", "simpo"})
"""Those that take means a token."""
SMOOTHED = frozenset({"sigmoid", "simpo"})
"""Those that read `label_smoothing`."""
INVERSE = frozenset({"ipo", "simpo"})
"""Those that divide by `beta`."""
