"""Preference losses over pairs, from the log-probabilities of their completions.

One function a variant, each [pairs] to [pairs]; `LOSSES` is the table that `loss_type` chooses from, and says what each
reads. The names and
the choices that papers leave open are those of TRL 1.16. Notation: a pair's log-ratio is log pi(y|x) - log ref(y|x)
of a completion y; a score is f'(ratio) of the divergence that the objective is regularized with (the log-ratio itself
for the reverse KL of DPO); delta is the chosen score less the rejected one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lowtide.objectives.named import LossTable


@dataclass(frozen=True)
class Pairs:
    """What is known of some pairs. All [pairs], log-probabilities in nats and summed over a completion's tokens."""

    chosen: Float[Tensor, " pairs"]
    rejected: Float[Tensor, " pairs"]
    ref_chosen: Float[Tensor, " pairs"]
    ref_rejected: Float[Tensor, " pairs"]
    chosen_tokens: Float[Tensor, " pairs"]
    """Tokens of the chosen completion."""
    rejected_tokens: Float[Tensor, " pairs"]

    @property
    def chosen_ratio(self) -> Tensor:
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected


class Settings(Protocol):
    """The options that the losses read."""

    beta: float
    label_smoothing: float
    discopop_tau: float
    f_divergence_type: str
    f_alpha_divergence_coef: float


# -- divergences: f' of the density ratio, from its log (arXiv 2309.16240) ------------------------------------------


def reverse_kl(ratio: Tensor, settings: Settings) -> Tensor:
    """log t, the divergence of DPO itself."""
    return ratio


def forward_kl(ratio: Tensor, settings: Settings) -> Tensor:
    """1 - 1/t."""
    return 1 - torch.exp(-ratio)


def js_divergence(ratio: Tensor, settings: Settings) -> Tensor:
    """log(2t / (t + 1))."""
    return math.log(2) + F.logsigmoid(ratio)


def alpha_divergence(ratio: Tensor, settings: Settings) -> Tensor:
    """(t^(a - 1) - 1) / (a - 1), which is log t in the limit a = 1. The exponent is kept below 80."""
    power = settings.f_alpha_divergence_coef - 1.0
    if abs(power) < 1e-6:
        return ratio
    return torch.expm1((power * ratio).clamp(max=80.0)) / power


DIVERGENCES: dict[str, Callable[[Tensor, Settings], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}
"""The variants of `f_divergence_type`."""


def scores(pairs: Pairs, settings: Settings) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected score of each pair."""
    divergence = DIVERGENCES[settings.f_divergence_type]
    return divergence(pairs.chosen_ratio, settings), divergence(pairs.rejected_ratio, settings)


def delta(pairs: Pairs, settings: Settings) -> Tensor:
    """The chosen score less the rejected one."""
    chosen, rejected = scores(pairs, settings)
    return chosen - rejected


def delta_per_token(pairs: Pairs, settings: Settings) -> Tensor:
    """The same with each score divided by the tokens of its completion."""
    chosen, rejected = scores(pairs, settings)
    return chosen / pairs.chosen_tokens.clamp(min=1) - rejected / pairs.rejected_tokens.clamp(min=1)


# -- losses that are a sum over pairs -------------------------------------------------------------------------------


def sigmoid(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """DPO: -log sigmoid(beta delta) (arXiv 2305.18290, equation 7). Labels are not smoothed; `robust` does that."""
    return -F.logsigmoid(settings.beta * delta(pairs, settings))


def sigmoid_norm(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """DPO on scores a token (the length-normalized DPO of Tulu 3, arXiv 2411.15124)."""
    return -F.logsigmoid(settings.beta * delta_per_token(pairs, settings))


def hinge(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """SLiC's hinge on the DPO margin (arXiv 2305.10425; 2309.06657)."""
    return torch.relu(1 - settings.beta * delta(pairs, settings))


def ipo(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """IPO (arXiv 2310.12036, equation 17), on scores a token, as its authors did."""
    return (delta_per_token(pairs, settings) - 1 / (2 * settings.beta)) ** 2


def exo_pair(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """EXO's reverse KL to a smoothed preference (arXiv 2402.00856, equation 16)."""
    margin = settings.beta * delta(pairs, settings)
    log_chosen, log_rejected = math.log1p(-settings.label_smoothing), math.log(settings.label_smoothing)
    return torch.sigmoid(margin) * (F.logsigmoid(margin) - log_chosen) + torch.sigmoid(-margin) * (
        F.logsigmoid(-margin) - log_rejected
    )


def nca_pair(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """Noise-contrastive alignment (arXiv 2402.05369)."""
    chosen, rejected = settings.beta * pairs.chosen_ratio, settings.beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """DPO unbiased under labels flipped at the rate `label_smoothing` (arXiv 2403.00409)."""
    margin, flipped = settings.beta * delta(pairs, settings), settings.label_smoothing
    return (-(1 - flipped) * F.logsigmoid(margin) + flipped * F.logsigmoid(-margin)) / (1 - 2 * flipped)


def bco_pair(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """Binary classification of each side, without BCO's running shift (arXiv 2404.04656)."""
    return -F.logsigmoid(settings.beta * pairs.chosen_ratio) - F.logsigmoid(-settings.beta * pairs.rejected_ratio)


def sppo_hard(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """SPPO with hard win probabilities (arXiv 2405.00675, equation 4.7)."""
    return (pairs.chosen_ratio - 0.5 / settings.beta) ** 2 + (pairs.rejected_ratio + 0.5 / settings.beta) ** 2


def apo_zero(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """APO for chosen answers that are better than the model's (arXiv 2408.06266, equation 7)."""
    chosen, rejected = settings.beta * pairs.chosen_ratio, settings.beta * pairs.rejected_ratio
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """APO for chosen answers that are worse than the model's (arXiv 2408.06266, equation 8)."""
    chosen, rejected = settings.beta * pairs.chosen_ratio, settings.beta * pairs.rejected_ratio
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """The discovered mix of logistic and exponential loss (arXiv 2406.08414, equation 5)."""
    margin = settings.beta * delta(pairs, settings)
    mix = torch.sigmoid(margin / settings.discopop_tau)
    return -F.logsigmoid(margin) * (1 - mix) + torch.exp(-margin) * mix


# -- losses that look at the batch as a whole -----------------------------------------------------------------------


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing


def aot(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """Stochastic dominance of sorted margins over sorted reference margins (arXiv 2406.05882, paired)."""
    policy = torch.sort(pairs.chosen - pairs.rejected).values
    reference = torch.sort(pairs.ref_chosen - pairs.ref_rejected).values
    return _smoothed(settings.beta * (policy - reference), settings.label_smoothing)


def aot_unpaired(pairs: Pairs, settings: Settings) -> Float[Tensor, " pairs"]:
    """Stochastic dominance of sorted chosen ratios over sorted rejected ones (arXiv 2406.05882, unpaired)."""
    chosen, rejected = torch.sort(pairs.chosen_ratio).values, torch.sort(pairs.rejected_ratio).values
    return _smoothed(settings.beta * (chosen - rejected), settings.label_smoothing)


@dataclass(frozen=True)
class PairLoss:
    """A variant of DPO's `loss_type`."""

    fn: Callable[[Pairs, Settings], Tensor]
    """From pairs to the loss of each, [pairs]."""
    reads: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The options that it reads beside `beta`; another that is set for it alone would be without effect."""
    whole: bool = field(default=False, kw_only=True)
    """It is no sum over pairs: it has to see the whole batch of an optimizer step at once."""
    divides_by_beta: bool = field(default=False, kw_only=True)


DIVERGENCE, SMOOTHING = frozenset({"f_divergence_type"}), frozenset({"label_smoothing"})

LOSSES = LossTable(
    {
        "sigmoid": PairLoss(sigmoid, reads=DIVERGENCE),
        "sigmoid_norm": PairLoss(sigmoid_norm, reads=DIVERGENCE),
        "hinge": PairLoss(hinge, reads=DIVERGENCE),
        "ipo": PairLoss(ipo, reads=DIVERGENCE, divides_by_beta=True),
        "exo_pair": PairLoss(exo_pair, reads=DIVERGENCE | SMOOTHING),
        "nca_pair": PairLoss(nca_pair),
        "robust": PairLoss(robust, reads=DIVERGENCE | SMOOTHING),
        "bco_pair": PairLoss(bco_pair),
        "sppo_hard": PairLoss(sppo_hard, divides_by_beta=True),
        "aot": PairLoss(aot, reads=SMOOTHING, whole=True),
        "aot_unpaired": PairLoss(aot_unpaired, reads=SMOOTHING, whole=True),
        "apo_zero": PairLoss(apo_zero),
        "apo_down": PairLoss(apo_down),
        "discopop": PairLoss(discopop, reads=DIVERGENCE | {"discopop_tau"}),
    },
    lambda pairs: pairs.chosen,
    PairLoss,
)
"""The variants of DPO's `loss_type`, but for `sft`, which is a mean over tokens."""
