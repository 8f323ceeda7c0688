"""Losses over completions that the policy wrote, weighted by advantages: the variants of GRPO, and RLOO.

One function a variant, from what is known of the tokens that were written to the loss of each, [scores]; nothing here
knows of batches or models. How these are added up is a variant's `Scale`. Shapes: `scores` tokens that the policy
wrote, `completions` that they are of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lowtide.objectives.named import LossTable
from lowtide.objectives.outcome import Counts, Mean
from lowtide.ops.float64 import to_float64

FARTHEST = 20.0
"""Log-ratios are kept within so many nats of 0 before they are raised to a power."""
SMALLEST = math.log(1e-8)
"""The smallest log of a sequence's weight in VESPO."""


@dataclass(frozen=True)
class Written:
    """What is known of tokens that the policy wrote. Log-probabilities in nats, at the temperature of sampling."""

    logprobs: Float[Tensor, " scores"]
    """Of the policy that is trained, with gradients."""
    old: Float[Tensor, " scores"]
    """Of the policy that wrote them; without gradients, as is all that follows but `entropies`."""
    advantages: Float[Tensor, " scores"]
    """Of the completion, or of the token."""
    completion: Int[Tensor, " scores"]
    """The completion that a token is of."""
    lengths: Float[Tensor, " completions"]
    """Tokens of each completion that the policy wrote."""
    window_tokens: Float[Tensor, " scores"]
    """The tokens of all ranks that a step learns from, on average over the steps of one generation."""
    sampled: Float[Tensor, " scores"]
    """Log-probabilities that the generator says it drew them with; NaN where it does not."""
    reference: Float[Tensor, " scores"] | None = None
    entropies: Float[Tensor, " scores"] | None = None
    """Of the distributions that they were drawn from, in nats, with gradients."""
    kept: Bool[Tensor, " scores"] | None = None
    """The tokens of highest entropy, which alone take part; None where all do."""
    correction: Float[Tensor, " scores"] | None = None
    """Importance ratio of the old policy against the generator that wrote them."""
    log_correction: Float[Tensor, " completions"] | None = None
    """The log of that of whole completions."""

    def sums(self, values: Float[Tensor, " scores"]) -> Float[Tensor, " completions"]:
        """Sums over the tokens of each completion."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.completion, values)

    def means(self, values: Float[Tensor, " scores"]) -> Float[Tensor, " completions"]:
        """Means over the tokens of each completion; 0 for one without tokens."""
        return self.sums(values) / self.lengths.clamp(min=1)

    @property
    def log_ratios(self) -> Float[Tensor, " scores"]:
        """How much likelier each token has become since it was written."""
        return self.logprobs - self.old


class ClipSettings(Protocol):
    """The options that `clipped` reads."""

    epsilon: float

    @property
    def delta(self) -> float | None:
        """The largest ratio of a completion that lost; None for any."""
        ...

    @property
    def upper(self) -> float:
        """The bound above, which is `epsilon` where none is set."""
        ...


class Settings(ClipSettings, Protocol):
    """The options that the losses read."""

    sapo_temperature_neg: float
    sapo_temperature_pos: float
    vespo_k_pos: float
    vespo_k_neg: float
    vespo_lambda_pos: float
    vespo_lambda_neg: float


def ratios(written: Written, level: str) -> Float[Tensor, " scores"]:
    """Importance ratios of each token ("token"), or of its completion: the geometric mean of those of its tokens
    ("sequence"; GSPO, arXiv 2507.18071, equation 7)."""
    logs = written.log_ratios
    return torch.exp(logs if level == "token" else written.means(logs)[written.completion])


def clipped(written: Written, ratio: Tensor, settings: ClipSettings) -> Float[Tensor, " scores"]:
    """The smaller of the plain and the clipped surrogate (arXiv 2402.03300, equation 3; PPO's), bounded on its other
    side too by `delta` (arXiv 2505.07291)."""
    within = torch.clamp(ratio, 1 - settings.epsilon, 1 + settings.upper)
    bounded = ratio if settings.delta is None else torch.clamp(ratio, max=settings.delta)
    return -torch.minimum(bounded * written.advantages, within * written.advantages)


def beyond_clip(
    written: Written, ratio: Tensor, settings: Settings
) -> tuple[Bool[Tensor, " scores"], Bool[Tensor, " scores"]]:
    """Where the clip holds: (below, above)."""
    bounded = ratio if settings.delta is None else torch.clamp(ratio, max=settings.delta)
    low = (bounded < 1 - settings.epsilon) & (written.advantages < 0)
    return low, (bounded > 1 + settings.upper) & (written.advantages > 0)


def geometric_mean(written: Written, ratio: Tensor, settings: Settings) -> Float[Tensor, " scores"]:
    """The geometric mean of the ratios of a completion's tokens, whose logs are clipped on the side on which they gain
    (arXiv 2507.20673, equation 4). Each of its tokens has this loss, so that their mean over the completion is it;
    tokens that are left out have no part in the mean, and the others count for them."""
    logs = written.log_ratios
    gained = torch.clamp(logs, max=settings.upper)
    within = torch.where(written.advantages > 0, gained, torch.clamp(logs, min=-settings.epsilon))
    taking = torch.ones_like(written.old) if written.kept is None else written.kept.to(written.old.dtype)
    counts = written.sums(taking).clamp(min=1)
    weight = torch.exp(written.sums(within * taking) / counts) * written.lengths / counts
    return -weight[written.completion] * written.advantages


def beyond_log_clip(
    written: Written, ratio: Tensor, settings: Settings
) -> tuple[Bool[Tensor, " scores"], Bool[Tensor, " scores"]]:
    """Where the clip of logs holds: (below, above)."""
    logs, gained = written.log_ratios.detach(), written.advantages > 0
    return (logs < -settings.epsilon) & (written.advantages < 0), (logs > settings.upper) & gained


def cispo(written: Written, ratio: Tensor, settings: Settings) -> Float[Tensor, " scores"]:
    """Log-probabilities weighted by ratios that are clipped above and carry no gradient (arXiv 2506.13585, eq. 4)."""
    return -torch.clamp(ratio, max=settings.upper).detach() * written.advantages * written.logprobs


def sapo(written: Written, ratio: Tensor, settings: Settings) -> Float[Tensor, " scores"]:
    """A smooth gate in place of the clip (arXiv 2511.20347, equation 6)."""
    temperature = torch.where(written.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * written.advantages


def vespo(written: Written, ratio: Tensor, settings: Settings) -> Float[Tensor, " scores"]:
    """Log-probabilities weighted by a Gamma kernel of the completion's ratio (arXiv 2602.10693)."""
    return -gamma_weights(written, settings) * written.advantages * written.logprobs


@torch.no_grad()
def gamma_weights(written: Written, settings: Settings) -> Float[Tensor, " scores"]:
    """`w^k exp(lambda (1 - w))` of each token's completion, where `w` is the ratio of the whole completion."""
    log_weight = written.sums(written.log_ratios.clamp(-FARTHEST, FARTHEST))
    if written.log_correction is not None:
        log_weight = log_weight + written.log_correction
    log_weight = log_weight.clamp(SMALLEST, FARTHEST)[written.completion]
    gained = written.advantages >= 0
    power = torch.where(gained, settings.vespo_k_pos, settings.vespo_k_neg)
    decay = torch.where(gained, settings.vespo_lambda_pos, settings.vespo_lambda_neg).clamp(min=1e-4)
    weights = torch.exp(decay + power * log_weight - decay * torch.exp(log_weight))
    return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class Scale(Enum):
    """What a sum over tokens is divided by."""

    COMPLETION = "completion"
    """The tokens of each completion, then the completions of a step."""
    STEP = "step"
    """The tokens of a step."""
    WINDOW = "window"
    """The tokens of a step on average over those of one generation."""
    LONGEST = "longest"
    """The completions of a step, times the most tokens that one may have."""
    SUM = "sum"
    """The completions of a step."""


@dataclass(frozen=True)
class PolicyLoss:
    """A variant of GRPO's `loss_type`."""

    fn: Callable[[Written, Tensor, Settings], Tensor]
    """From tokens, their ratios [scores] and the options to the loss of each, [scores]."""
    scale: Scale
    reads: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The options that it reads; another that is set for it alone would be without effect."""
    corrects: bool = field(default=False, kw_only=True)
    """It takes in the generator's correction by itself."""
    beyond: Callable[[Written, Tensor, Settings], tuple[Tensor, Tensor]] | None = field(default=None, kw_only=True)
    """Where its clip holds, (below, above); None if it has none."""
    of_tokens: bool = field(default=False, kw_only=True)
    """It takes ratios of tokens alone, whatever `importance_sampling_level` says."""


CLIP = frozenset({"epsilon", "epsilon_high", "delta"})
LOSSES = LossTable(
    {
        "grpo": PolicyLoss(clipped, Scale.COMPLETION, reads=CLIP, beyond=beyond_clip),
        "dr_grpo": PolicyLoss(clipped, Scale.LONGEST, reads=CLIP, beyond=beyond_clip),
        "dapo": PolicyLoss(clipped, Scale.WINDOW, reads=CLIP, beyond=beyond_clip),
        "bnpo": PolicyLoss(clipped, Scale.STEP, reads=CLIP, beyond=beyond_clip),
        "luspo": PolicyLoss(clipped, Scale.SUM, reads=CLIP, beyond=beyond_clip),
        "gmpo": PolicyLoss(
            geometric_mean,
            Scale.COMPLETION,
            reads=frozenset({"epsilon_high"}),
            beyond=beyond_log_clip,
            of_tokens=True,
        ),
        "cispo": PolicyLoss(cispo, Scale.WINDOW, reads=frozenset({"epsilon_high"})),
        "sapo": PolicyLoss(sapo, Scale.COMPLETION, reads=frozenset({"sapo_temperature_neg", "sapo_temperature_pos"})),
        "vespo": PolicyLoss(
            vespo,
            Scale.WINDOW,
            reads=frozenset({"vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"}),
            corrects=True,
        ),
    },
    lambda written: written.logprobs,
    lambda fn: PolicyLoss(fn, Scale.WINDOW),
)
"""The variants of GRPO's `loss_type`."""


def shares(written: Written, scale: Scale, counts: Counts, longest: int) -> Float[Tensor, " scores"]:
    """What the loss of each token is multiplied by, so that their sum is the loss.

    Args:
        counts: of the whole step: its `completions` and its `scores`.
        longest: the most tokens that a completion may have.
    """
    one = torch.ones_like(written.old)
    match scale:
        case Scale.COMPLETION:
            return 1 / (written.lengths.clamp(min=1)[written.completion] * counts["completions"])
        case Scale.STEP:
            return one / max(counts["scores"], 1)
        case Scale.WINDOW:
            window = torch.where(written.window_tokens > 0, written.window_tokens, counts["scores"])
            return 1 / window.clamp(min=1)
        case Scale.LONGEST:
            return one / (counts["completions"] * longest)
        case Scale.SUM:
            return one / counts["completions"]


# -- what is added to them ----------------------------------------------------------------------------------------


def divergence(written: Written) -> Float[Tensor, " scores"]:
    """An estimate of the KL divergence from the reference that is never negative (Schulman's third, `k3`)."""
    assert written.reference is not None, "a divergence is from a reference"
    ahead = written.reference - written.logprobs
    return torch.exp(ahead) - ahead - 1


@torch.no_grad()
def near_policy(written: Written, threshold: float) -> Bool[Tensor, " scores"]:
    """False for completions that lost and that the policy has left behind: the mean log-ratio of the generator against
    the policy is above a threshold (arXiv 2512.02556, equation 9)."""
    distance = written.means((written.sampled - written.logprobs).nan_to_num(nan=0.0))[written.completion]
    return (written.advantages >= 0) | (distance <= threshold)


# -- metrics ------------------------------------------------------------------------------------------------------


def over_tokens(written: Written, values: Tensor, level: str = "token") -> Mean:
    """The mean of [scores] over tokens, or, of values that are a completion's, over completions that have tokens to
    learn from."""
    values = to_float64(values.detach())
    if level == "token":
        return Mean(values.sum(), float(values.numel()))
    return Mean(written.means(values).sum(), to_float64((written.lengths > 0).sum()))


def clip_metrics(
    written: Written, low: Bool[Tensor, " scores"], high: Bool[Tensor, " scores"], level: str
) -> tuple[Mapping[str, Mean], Mapping[str, Tensor], Mapping[str, Tensor]]:
    """How often the clip holds, below and above: means over tokens, and the smallest and largest share of a
    completion's."""
    names = {"low_mean": low, "high_mean": high, "region_mean": low | high}
    means = {f"clip_ratio/{name}": over_tokens(written, each.float(), level) for name, each in names.items()}
    empty = written.lengths == 0
    lows = {"clip_ratio/low_min": written.means(low.float()).masked_fill(empty, math.inf).min()}
    highs = {"clip_ratio/high_max": written.means(high.float()).masked_fill(empty, -math.inf).max()}
    return means, lows, highs
