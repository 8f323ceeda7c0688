"""Each loss that is a pure function, against its formula with probabilities in place of their stable forms: values and
gradients, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.objectives import classes, kto, ppo, preference, reference_free, replaced, reward, sft
from lowtide.objectives.distillation import divergence
from lowtide.ops.logits.linear_logprobs import TokenStats

PAIRS = 7


def numbers(count: int, seed: int, low: float = -3.0, high: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return (low + (high - low) * drawn).requires_grad_()


def assert_same(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """The values, and the gradients of a sum with a weight of its own for each."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-10, atol=1e-10)
    weights = torch.arange(1.0, found.numel() + 1, dtype=torch.float64).view_as(found)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), leaves, retain_graph=True, allow_unused=True),
        torch.autograd.grad((expected * weights).sum(), leaves, retain_graph=True, allow_unused=True),
        strict=True,
    ):
        none = torch.zeros(())
        torch.testing.assert_close(none if one is None else one, none if other is None else other, rtol=1e-9, atol=1e-9)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def smoothed(margin: Tensor, share: float) -> Tensor:
    return -(1 - share) * sigmoid(margin).log() - share * sigmoid(-margin).log()


# -- pairs with a reference -------------------------------------------------------------------------------------------

ALPHA, BETA, SMOOTHING, TAU = 0.3, 0.4, 0.2, 0.6
SETTINGS: Any = SimpleNamespace(
    beta=BETA, label_smoothing=SMOOTHING, discopop_tau=TAU, f_divergence_type="", f_alpha_divergence_coef=ALPHA
)
SCORES = {
    "reverse_kl": lambda t: t.log(),
    "forward_kl": lambda t: 1 - 1 / t,
    "js_divergence": lambda t: (2 * t / (t + 1)).log(),
    "alpha_divergence": lambda t: (t ** (ALPHA - 1) - 1) / (ALPHA - 1),
}


def paired(policy: Tensor, reference: Tensor, lengths: Tensor, score: Any) -> dict[str, Tensor]:
    """The losses of chosen and rejected completions, [2, pairs] each."""
    ratio = policy - reference
    found = score(torch.exp(ratio))
    margin = BETA * (found[0] - found[1])
    a_token = found[0] / lengths[0] - found[1] / lengths[1]
    mix = sigmoid(margin / TAU)
    scaled, differences = BETA * ratio, (policy[0] - policy[1], reference[0] - reference[1])
    return {
        "sigmoid": -sigmoid(margin).log(),
        "sigmoid_norm": -sigmoid(BETA * a_token).log(),
        "hinge": torch.where(margin < 1, 1 - margin, 0.0),
        "ipo": (a_token - 1 / (2 * BETA)) ** 2,
        "exo_pair": sigmoid(margin) * (sigmoid(margin) / (1 - SMOOTHING)).log()
        + sigmoid(-margin) * (sigmoid(-margin) / SMOOTHING).log(),
        "nca_pair": -sigmoid(scaled[0]).log() - (sigmoid(-scaled[0]).log() + sigmoid(-scaled[1]).log()) / 2,
        "robust": ((SMOOTHING - 1) * sigmoid(margin).log() + SMOOTHING * sigmoid(-margin).log()) / (1 - 2 * SMOOTHING),
        "bco_pair": -sigmoid(scaled[0]).log() - sigmoid(-scaled[1]).log(),
        "sppo_hard": (ratio[0] - 1 / (2 * BETA)) ** 2 + (ratio[1] + 1 / (2 * BETA)) ** 2,
        "aot": smoothed(BETA * (differences[0].sort().values - differences[1].sort().values), SMOOTHING),
        "aot_unpaired": smoothed(BETA * (ratio[0].sort().values - ratio[1].sort().values), SMOOTHING),
        "apo_zero": 1 - sigmoid(scaled[0]) + sigmoid(scaled[1]),
        "apo_down": sigmoid(scaled[0]) + 1 - sigmoid(scaled[0] - scaled[1]),
        "discopop": -(1 - mix) * sigmoid(margin).log() + mix * torch.exp(-margin),
    }


@pytest.mark.parametrize("kind", preference.DIVERGENCES)
@pytest.mark.parametrize("name", preference.LOSSES)
def test_losses_of_pairs(name, kind):
    if kind != "reverse_kl" and "f_divergence_type" not in preference.LOSSES[name].reads:
        kind = "reverse_kl"  # the options refuse the others, and the loss reads none
    policy, reference = numbers(2 * PAIRS, 1), numbers(2 * PAIRS, 2).detach()
    lengths = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [7, 5, 3, 1, 2, 4, 6]], dtype=torch.float64)
    (chosen, rejected), (ref_chosen, ref_rejected) = policy.view(2, PAIRS), reference.view(2, PAIRS)
    pairs = preference.Pairs(chosen, rejected, ref_chosen, ref_rejected, *lengths)
    settings = SimpleNamespace(**{**vars(SETTINGS), "f_divergence_type": kind})
    expected = paired(policy.view(2, PAIRS), reference.view(2, PAIRS), lengths, SCORES[kind])[name]
    assert_same(preference.LOSSES[name].fn(pairs, settings), expected, [policy])


def test_an_alpha_of_one_is_the_limit():
    ratio = numbers(PAIRS, 1)
    settings: Any = SimpleNamespace(f_alpha_divergence_coef=1.0)
    assert_same(preference.alpha_divergence(ratio, settings), ratio * 1.0, [ratio])


# -- pairs without one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*reference_free.LOSSES, "tpo-l"])
def test_losses_of_contrasts(name):
    contrast = numbers(PAIRS, 3)
    settings: Any = SimpleNamespace(beta=BETA, label_smoothing=SMOOTHING, simpo_gamma=0.5, tpo_l_gamma=0.7)
    expected = {
        "sigmoid": smoothed(BETA * contrast, SMOOTHING),
        "hinge": torch.where(BETA * contrast < 1, 1 - BETA * contrast, 0.0),
        "ipo": (contrast - 1 / (2 * BETA)) ** 2,
        "simpo": smoothed(BETA * contrast - 0.5, SMOOTHING),
        "tpo-l": smoothed(BETA * contrast - 0.7, SMOOTHING),
    }
    losses = reference_free.LOSSES | reference_free.TPO_LOSSES
    assert_same(losses[name].fn(contrast, settings), expected[name], [contrast])


def test_odds_and_rewards_of_probabilities():
    chosen, rejected = (numbers(PAIRS, seed, -2.5, -0.01) for seed in (4, 5))
    p, q = chosen.exp(), rejected.exp()
    odds = (p / (1 - p) / (q / (1 - q))).log()
    assert_same(reference_free.log_odds_ratio(chosen, rejected), odds, [chosen, rejected])
    assert_same(reference_free.alpha_reward(chosen, 0.7), (1 - p**-0.7) / 0.7, [chosen])
    assert reference_free.alpha_reward(chosen, 0.0) is chosen


@pytest.mark.parametrize("center", [None, 0.1])
@pytest.mark.parametrize("margin", [False, True])
def test_reward_models(margin, center):
    chosen, rejected = numbers(PAIRS, 6), numbers(PAIRS, 7)
    by = numbers(PAIRS, 8).detach() if margin else None
    expected = -sigmoid(chosen - rejected - (0 if by is None else by)).log()
    expected = expected + (center or 0) * (chosen + rejected) ** 2
    assert_same(reward.bradley_terry(chosen, rejected, by, center), expected, [chosen, rejected])


# -- single completions -----------------------------------------------------------------------------------------------


def test_losses_of_single_completions():
    policy, reference = numbers(PAIRS, 9), numbers(PAIRS, 10).detach()
    desirable = torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()
    rows = kto.Unpaired(policy, reference, desirable).shifted_by(0.35)
    settings: Any = SimpleNamespace(beta=BETA)
    gain, reward_ = BETA * (policy - reference - 0.35), BETA * (policy - reference)
    expected = {
        kto.kto: torch.where(desirable, 1 - sigmoid(gain), 1 - sigmoid(-gain)),
        kto.apo_zero_unpaired: torch.where(desirable, 1 - sigmoid(reward_), sigmoid(reward_)),
        kto.bco: -torch.where(desirable, sigmoid(reward_ - 0.35), sigmoid(0.35 - reward_)).log(),
    }
    assert {loss.fn for loss in kto.LOSSES.values()} < {*expected}
    for loss, plain in expected.items():
        assert_same(loss(rows, settings), plain, [policy])


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_losses_of_tokens():
    logprobs, means, apart = (numbers(PAIRS, seed, -4.0, -0.1) for seed in (11, 12, 13))
    stats = TokenStats(logprobs, None, means, None, None, apart)
    constant = logprobs.detach().exp()
    assert_same(sft.LOSSES["nll"](stats), -logprobs, [logprobs])
    assert_same(sft.LOSSES["dft"](stats), -constant * logprobs, [logprobs])
    assert_same(sft.smoothed_nll(0.2)(stats), -0.8 * logprobs - 0.2 * means, [logprobs, means])
    assert divergence(stats) is apart


def test_losses_of_classifiers():
    logits = numbers(4 * 3, 14)
    table, weights = logits.view(4, 3), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    target, several = torch.tensor([2, 0, 1, 1]), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).double()
    logp = (table.exp() / table.exp().sum(1, keepdim=True)).log()
    own = torch.stack([logp[row, label] * weights[label] for row, label in enumerate(target.tolist())])
    everywhere = (logp * weights).sum(1) / 3
    assert_same(classes.label_nll(table, target, weights), -own.sum(), [logits])
    assert_same(classes.label_nll(table, target, weights, 0.3), -(0.7 * own + 0.3 * everywhere).sum(), [logits])
    binary = -(several * sigmoid(table).log() + (1 - several) * sigmoid(-table).log())
    assert_same(classes.binary_nll(table, several, weights), (binary * weights).sum(), [logits])
    assert_same(classes.squared_errors(table, several), ((table - several) ** 2).sum(), [logits])
    hit = several.bool().view(-1)
    expected = torch.where(hit, -sigmoid(logits).log(), -sigmoid(-logits).log())
    assert_same(replaced.detection_nll(logits, hit), expected, [logits])


# -- tokens that a policy wrote ---------------------------------------------------------------------------------------


def test_clipped_losses_of_policies_and_values():
    """One token of each kind: inside of the bounds, and beyond each of them, with gains and losses."""
    old = torch.zeros(6, dtype=torch.float64)
    logprobs = torch.tensor([0.1, 0.1, 0.5, 0.5, -0.5, -0.5], dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([2.0, -2.0] * 3, dtype=torch.float64)
    acted = ppo.Acted(logprobs, old, advantages, torch.ones(6).bool())
    losses, held = ppo.policy_losses(acted, 0.2)
    ratio = logprobs.exp()
    expected = torch.stack(
        [-2 * ratio[0], 2 * ratio[1], ratio[2] * 0 - 2 * 1.2, 2 * ratio[3], -2 * ratio[4], 2 * 0.8 + ratio[5] * 0]
    )
    assert_same(losses, expected, [logprobs])
    assert held.tolist() == [False, False, True, False, False, True]

    values = torch.tensor([0.1, 0.6, 0.6, -0.6], dtype=torch.float64).requires_grad_()
    returns = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    losses, held = ppo.value_losses(ppo.Expected(values, torch.zeros(4).double(), returns, torch.ones(4).bool()), 0.25)
    plain = (values - returns) ** 2 / 2
    expected = torch.stack([plain[0], 0.75**2 / 2 + values[1] * 0, plain[2], 0.75**2 / 2 + values[3] * 0])
    assert_same(losses, expected, [values])
    assert held.tolist() == [False, True, False, True]


def test_estimates_of_a_divergence():
    logprobs, reference = numbers(PAIRS, 15), numbers(PAIRS, 16)
    ratio = reference - logprobs
    assert_same(ppo.ESTIMATORS["k1"](logprobs, reference), -ratio, [logprobs, reference])
    assert_same(ppo.ESTIMATORS["k3"](logprobs, reference), ratio.exp() - 1 - ratio, [logprobs, reference])


def test_rewards_and_advantages_of_tokens():
    lengths = [3, 0, 1, 4]
    penalties, values = numbers(8, 17).detach(), numbers(8, 18).detach()
    rewards = torch.tensor([1.0, 50.0, -2.0, 0.5], dtype=torch.float64)
    found = ppo.token_rewards(penalties, rewards, lengths)
    expected = -penalties.clone()
    expected[2] += 1.0
    expected[3] += -2.0
    expected[7] += 0.5
    torch.testing.assert_close(found, expected)
    advantages, first = [], 0
    for length in lengths:
        own, value = found[first : first + length], torch.cat([values[first : first + length], torch.zeros(1)])
        errors = [own[t] + 0.9 * value[t + 1] - value[t] for t in range(length)]
        advantages += [sum((0.9 * 0.7) ** (k - t) * errors[k] for k in range(t, length)) for t in range(length)]
        first += length
    torch.testing.assert_close(
        ppo.estimated_advantages(found, values, lengths, gamma=0.9, lam=0.7), torch.stack(advantages)
    )
    nothing = torch.zeros(0, dtype=torch.float64)
    assert not len(ppo.estimated_advantages(nothing, nothing, [0, 0], gamma=0.9, lam=0.7))
    torch.testing.assert_close(ppo.whitened(values, 0.5, 4.0), (values - 0.5) / (4.0 + 1e-8) ** 0.5)
    torch.testing.assert_close(
        ppo.whitened(values, 0.5, 4.0, shift_mean=False), (values - 0.5) / (4.0 + 1e-8) ** 0.5 + 0.5
    )
