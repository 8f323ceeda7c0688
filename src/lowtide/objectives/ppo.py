"""Proximal policy optimization (arXiv 1707.06347) of tokens as actions, with generalized advantage estimation
(arXiv 1506.02438).

Pure functions, from log-probabilities, values and rewards of the tokens that a policy wrote. What the papers leave open
(penalties a token, whitening, clipped values) is as in InstructGPT (arXiv 2203.02155) and TRL before 1.0. Shapes:
`scores` tokens that the policy wrote, those of a completion one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

TINY = 1e-8
"""Added to a variance before its root divides."""


# -- rewards to advantages --------------------------------------------------------------------------------------------


def log_ratio(logprobs: Float[Tensor, " scores"], reference: Float[Tensor, " scores"]) -> Float[Tensor, " scores"]:
    """The plain estimate of the divergence from the reference (`k1`)."""
    return logprobs - reference


def never_negative(logprobs: Float[Tensor, " scores"], reference: Float[Tensor, " scores"]) -> Float[Tensor, " scores"]:
    """The unbiased estimate that is never negative (`k3`)."""
    ahead = reference - logprobs
    return torch.expm1(ahead) - ahead


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": log_ratio, "k3": never_negative}
"""The variants of `kl_estimator`, by Schulman's names (joschu.net/blog/kl-approx.html)."""


def token_rewards(
    penalties: Float[Tensor, " scores"], rewards: Float[Tensor, " completions"], lengths: Sequence[int]
) -> Float[Tensor, " scores"]:
    """The reward of each token: less its penalty, and at a completion's last token that of the completion.

    Args:
        lengths: tokens of each completion; one of none gets nothing.
    """
    found = -penalties
    ends = torch.tensor(lengths, dtype=torch.long).cumsum(0) - 1
    some = torch.tensor([length > 0 for length in lengths], dtype=torch.bool)
    return found.index_add(0, ends[some], rewards[some].to(found))


def estimated_advantages(
    rewards: Float[Tensor, " scores"],
    values: Float[Tensor, " scores"],
    lengths: Sequence[int],
    *,
    gamma: float,
    lam: float,
) -> Float[Tensor, " scores"]:
    """Generalized advantage estimates (arXiv 1506.02438, equation 16); nothing is expected after the last token.

    Args:
        values: what was expected before each token.
        lengths: tokens of each completion.
        gamma: discount of a reward a token.
        lam: weight of longer estimates against the bias of the values.
    """
    if not len(rewards):
        return rewards.clone()
    reward, value = (pad_sequence(list(each.split(list(lengths)))) for each in (rewards, values))
    after, next_value = torch.zeros_like(reward[0]), torch.zeros_like(reward[0])
    found = torch.empty_like(reward)
    inside = torch.arange(len(reward))[:, None] < torch.tensor(lengths)
    for place in range(len(reward) - 1, -1, -1):
        error = reward[place] + gamma * next_value - value[place]
        after = torch.where(inside[place], error + gamma * lam * after, 0)
        next_value = value[place]
        found[place] = after
    return found.T[inside.T]


def whitened(
    values: Float[Tensor, " scores"], mean: float, variance: float, *, shift_mean: bool = True
) -> Float[Tensor, " scores"]:
    """Values brought to a variance of 1, and to a mean of 0 unless `shift_mean` is off."""
    found = (values - mean) * (variance + TINY) ** -0.5
    return found if shift_mean else found + mean


# -- losses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acted:
    """What is known of tokens that the policy wrote, [scores] each; all but `logprobs` and `entropies` are without
    gradients. Log-probabilities in nats, at the temperature of sampling."""

    logprobs: Float[Tensor, " scores"]
    """Of the policy that is trained."""
    old: Float[Tensor, " scores"]
    """Of the policy that wrote them."""
    advantages: Float[Tensor, " scores"]
    kept: Bool[Tensor, " scores"]
    """Whether a token takes part: it does not in a completion that nothing rewarded."""
    entropies: Float[Tensor, " scores"] | None = None

    @property
    def ratio(self) -> Float[Tensor, " scores"]:
        """How much likelier each token has become since it was written."""
        return torch.exp(self.logprobs - self.old)


@dataclass(frozen=True)
class Expected:
    """What was expected before these tokens, [scores] each; all but `values` are without gradients."""

    values: Float[Tensor, " scores"]
    """Of the value function that is trained."""
    old: Float[Tensor, " scores"]
    """Of the value function when they were written."""
    returns: Float[Tensor, " scores"]
    """What should have been expected."""
    kept: Bool[Tensor, " scores"]
    """As of `Acted`."""


def policy_losses(acted: Acted, cliprange: float) -> tuple[Float[Tensor, " scores"], Bool[Tensor, " scores"]]:
    """The larger of the plain and the clipped loss of each token (equation 7), and where that is the clipped one."""
    plain = -acted.advantages * acted.ratio
    within = -acted.advantages * acted.ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(plain, within), within > plain


def value_losses(expected: Expected, cliprange: float) -> tuple[Float[Tensor, " scores"], Bool[Tensor, " scores"]]:
    """Half the squared error of each value, the larger one of the value itself and of one that has moved no further
    than `cliprange`; and where that is the latter."""
    moved = expected.old + (expected.values - expected.old).clamp(-cliprange, cliprange)
    plain, within = (expected.values - expected.returns) ** 2, (moved - expected.returns) ** 2
    return torch.maximum(plain, within) / 2, within > plain
