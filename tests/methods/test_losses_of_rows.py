"""The loss and the metrics that each method makes of rows, against their plain formulas in float64: of the rows of a
step at once, and in two micro-batches of different sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.methods import (
    bco,
    cpo,
    dpo,
    kto,
    orpo,
    replaced_token_detection,
    reward,
    sequence_classification,
    token_classification,
    tpo,
)
from lowtide.methods.online import grpo, online_dpo, ppo, rloo
from lowtide.methods.shared.preference import ReadPairs
from lowtide.objectives import policy_gradient, preference
from lowtide.objectives.kto import Unpaired
from lowtide.objectives.outcome import Outcome
from lowtide.objectives.policy_gradient import Written
from lowtide.objectives.ppo import Acted, Expected
from lowtide.step.metrics import Totals

ROWS = 6
CUTS = {"whole": [slice(0, ROWS)], "two micro-batches": [slice(0, 2), slice(2, ROWS)]}
in_cuts = pytest.mark.parametrize("cut", CUTS)
CPU = torch.device("cpu")


def numbers(*shape: int, seed: int, low: float = -3.0, high: float = -0.2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def part_of(rows: Any, part: slice) -> Any:
    """Some rows: a part of the last axis of all that is known of them."""
    values = {each.name: getattr(rows, each.name) for each in dataclasses.fields(rows)}
    return type(rows)(
        **{
            name: part_of(value, part)
            if dataclasses.is_dataclass(value)
            else None
            if value is None
            else value[..., part]
            for name, value in values.items()
        }
    )


def assert_sums_to(
    loss: Callable[[Any], Outcome], parts: list[Any], leaf: Tensor, expected: Tensor, metrics: dict[str, Any]
) -> None:
    """The losses of the parts add up to what is expected, in value and gradient, and their metrics to these."""
    totals, found = Totals(), []
    for part in parts:
        outcome = loss(part)
        totals.take_outcome(outcome)
        found.append(outcome.loss)
    total = torch.stack(found).sum()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
    (one,), (other,) = (torch.autograd.grad(each, [leaf], retain_graph=True) for each in (total, expected))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert totals.read(CPU) == pytest.approx(
        {name: float(torch.as_tensor(value).detach()) for name, value in metrics.items()}, rel=1e-6
    )


# -- pairs ------------------------------------------------------------------------------------------------------------

COUNTS = {"pairs": ROWS, "nll_tokens": 31.0}


def read(weights: bool = False) -> tuple[ReadPairs, Tensor]:
    """Pairs, and the leaf that their log-probabilities are from: [3, pairs], of both sides and of the likelihood."""
    leaf = numbers(3, ROWS, seed=1).requires_grad_()
    scored = torch.tensor([[3, 1, 4, 2, 5, 6], [2, 2, 1, 7, 3, 4]], dtype=torch.float64)
    return ReadPairs(
        *(leaf[0] * 4, leaf[1] * 4, *numbers(2, ROWS, seed=2, low=-9, high=-3), *(scored + 1), *scored, -leaf[2] * 9),
        nll_tokens=torch.tensor([4.0, 6, 3, 8, 5, 5], dtype=torch.float64),
        top1=torch.tensor([1.0, 0, 3, 2, 1, 4], dtype=torch.float64),
        weights=numbers(ROWS, seed=3, low=0.2, high=0.9) if weights else None,
    ), leaf


def of_pairs(pairs: ReadPairs, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """The metrics of all methods over pairs, from their rewards."""
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "logps/chosen": pairs.chosen.mean(),
        "logps/rejected": pairs.rejected.mean(),
        "mean_token_accuracy": 11 / pairs.chosen_scored.sum(),
    }


@in_cuts
@pytest.mark.parametrize("divergence", preference.DIVERGENCES)
def test_dpo(divergence, cut):
    weights = {"sigmoid": 0.5, "sft": 2.0, "hinge": 1.5, "ipo": 0.25}
    options = dpo.DPOOptions(
        loss_type=[*weights], loss_weights=[*weights.values()], beta=0.3, f_divergence_type=divergence
    )
    pairs, leaf = read()
    expected = 2.0 * pairs.nll.sum() / 31
    for name in ("sigmoid", "hinge", "ipo"):
        expected = expected + weights[name] * preference.LOSSES[name].fn(pairs, options).mean()
    rewards = 0.3 * (pairs.chosen - pairs.ref_chosen), 0.3 * (pairs.rejected - pairs.ref_rejected)
    loss = partial(dpo.loss, counts=COUNTS, options=options)
    assert_sums_to(loss, [part_of(pairs, each) for each in CUTS[cut]], leaf, expected, of_pairs(pairs, *rewards))


@in_cuts
def test_weighted_dpo(cut):
    pairs, leaf = read(weights=True)
    options = dpo.DPOOptions(beta=0.3, use_weighting=True)
    rewards = 0.3 * (pairs.chosen - pairs.ref_chosen), 0.3 * (pairs.rejected - pairs.ref_rejected)
    expected = -(pairs.weights * F.logsigmoid(rewards[0] - rewards[1])).mean()
    loss = partial(dpo.loss, counts=COUNTS, options=options)
    assert_sums_to(loss, [part_of(pairs, each) for each in CUTS[cut]], leaf, expected, of_pairs(pairs, *rewards))


@in_cuts
@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo(name, alpha, cut):
    options = cpo.CPOOptions(loss_type=name, beta=0.4, cpo_alpha=0.7, simpo_gamma=0.6, alpha=alpha)
    pairs, leaf = read()
    used = pairs
    if name in ("ipo", "simpo"):
        chosen, rejected = pairs.chosen / pairs.chosen_scored, pairs.rejected / pairs.rejected_scored
        used = dataclasses.replace(pairs, chosen=chosen, rejected=rejected)
    chosen, rejected = ((1 - each.exp() ** -alpha) / alpha if alpha else each for each in (used.chosen, used.rejected))
    margin = 0.4 * (chosen - rejected)
    losses = {
        "sigmoid": -F.logsigmoid(margin),
        "hinge": torch.relu(1 - margin),
        "ipo": (chosen - rejected - 1 / 0.8) ** 2,
        "simpo": -F.logsigmoid(margin - 0.6),
    }
    expected = losses[name].mean() + 0.7 * pairs.nll.sum() / 31
    metrics = {**of_pairs(used, 0.4 * chosen, 0.4 * rejected), "nll_loss": pairs.nll.sum() / 31}
    loss = partial(cpo.loss, counts=COUNTS, options=options)
    assert_sums_to(loss, [part_of(pairs, each) for each in CUTS[cut]], leaf, expected, metrics)


@in_cuts
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "tpo-l"])
def test_tpo(name, cut):
    options = tpo.TPOOptions(loss_type=name, beta=0.4, tpo_alpha=0.7, tpo_l_gamma=0.6)
    pairs, leaf = read()
    chosen, rejected = pairs.chosen, pairs.rejected
    if name in ("ipo", "tpo-l"):
        chosen, rejected = chosen / pairs.chosen_scored, rejected / pairs.rejected_scored
    margin = 0.4 * (chosen - rejected)
    losses = {
        "sigmoid": -F.logsigmoid(margin),
        "hinge": torch.relu(1 - margin),
        "ipo": (chosen - rejected - 1 / 0.8) ** 2,
        "tpo-l": -F.logsigmoid(margin - 0.6),
    }
    expected = losses[name].mean() + 0.7 * pairs.nll.sum() / 31
    used = dataclasses.replace(pairs, chosen=chosen, rejected=rejected)
    metrics = {**of_pairs(used, 0.4 * chosen, 0.4 * rejected), "nll_loss": pairs.nll.sum() / 31}
    loss = partial(tpo.loss, counts=COUNTS, options=options)
    assert_sums_to(loss, [part_of(pairs, each) for each in CUTS[cut]], leaf, expected, metrics)


@in_cuts
def test_orpo(cut):
    pairs, leaf = read()
    chosen, rejected = pairs.chosen / pairs.chosen_scored, pairs.rejected / pairs.rejected_scored
    p, q = chosen.exp(), rejected.exp()
    odds = (p / (1 - p)).log() - (q / (1 - q)).log()
    expected = pairs.nll.sum() / 31 - 0.2 * F.logsigmoid(odds).mean()
    used = dataclasses.replace(pairs, chosen=chosen, rejected=rejected)
    metrics = {
        **of_pairs(used, 0.2 * chosen, 0.2 * rejected),
        "nll_loss": pairs.nll.sum() / 31,
        "log_odds_ratio": F.logsigmoid(odds).mean(),
        "log_odds_chosen": odds.mean(),
    }
    loss = partial(orpo.loss, counts=COUNTS, options=orpo.ORPOOptions(beta=0.2))
    assert_sums_to(loss, [part_of(pairs, each) for each in CUTS[cut]], leaf, expected, metrics)


@in_cuts
@pytest.mark.parametrize("center", [None, 0.2])
def test_reward(center, cut):
    leaf, margin = numbers(2, ROWS, seed=4, low=-2, high=2).requires_grad_(), numbers(ROWS, seed=5)
    chosen, rejected = leaf
    expected = -F.logsigmoid(chosen - rejected - margin).mean() + (center or 0) * ((chosen + rejected) ** 2).mean()
    metrics = {
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (chosen - rejected).mean(),
        "mean_reward": leaf.mean(),
        "min_reward": leaf.min(),
        "max_reward": leaf.max(),
    }
    loss = partial(reward.loss, counts=COUNTS, options=reward.RewardOptions(center_rewards_coefficient=center))
    rows = reward.Rewards(chosen, rejected, margin)
    assert_sums_to(loss, [part_of(rows, each) for each in CUTS[cut]], leaf, expected, metrics)


@in_cuts
@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_online_dpo(name, cut):
    """Of six pairs four are decided; of two of them a completion has no token to learn from."""
    leaf = numbers(2, ROWS, seed=6, low=-9).requires_grad_()
    reference, beta = numbers(2, ROWS, seed=7, low=-9), numbers(ROWS, seed=8, low=0.1, high=0.6)
    divergence, rewards = numbers(2, ROWS, seed=9, low=-1, high=1), numbers(2, ROWS, seed=10, low=-1, high=1)
    decided = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=torch.float64)
    learned = torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    one = torch.ones(ROWS, dtype=torch.float64)
    pairs = preference.Pairs(*leaf, *reference, one, one)
    written = online_dpo.WrittenPairs(pairs, decided, divergence, leaf.detach(), rewards, learned, beta)
    ratio = leaf - reference
    contrast = ratio[0] - ratio[1]
    losses = -F.logsigmoid(beta * contrast) if name == "sigmoid" else (contrast - 1 / (2 * beta)) ** 2
    gains, taken = beta * ratio, [learned[0] & decided.bool(), learned[1] & decided.bool()]
    both = taken[0] & taken[1]
    less = -beta * divergence
    metrics = {
        "rewards/chosen": gains[0][taken[0]].mean(),
        "rewards/rejected": gains[1][taken[1]].mean(),
        "rewards/accuracies": (gains[0] > gains[1])[both].double().mean(),
        "rewards/margins": (gains[0] - gains[1])[both].mean(),
        "logps/chosen": leaf[0][taken[0]].mean(),
        "logps/rejected": leaf[1][taken[1]].mean(),
        "objective/kl": divergence[learned].mean(),
        "objective/non_score_reward": less[learned].mean(),
        "objective/rlhf_reward": (rewards + less)[learned].mean(),
        "objective/entropy": -leaf[learned].mean(),
        "beta": beta.mean(),
    }
    loss = partial(online_dpo.loss, counts={"pairs": 4}, options=online_dpo.OnlineDPOOptions(loss_type=name))
    parts = [part_of(written, each) for each in CUTS[cut]]
    assert_sums_to(loss, parts, leaf, (losses * decided).sum() / 4, metrics)


# -- single completions -----------------------------------------------------------------------------------------------


def singles() -> tuple[Unpaired, Tensor]:
    leaf = numbers(ROWS, seed=11, low=-9).requires_grad_()
    return Unpaired(leaf, numbers(ROWS, seed=12, low=-9), torch.tensor([1, 0, 0, 1, 1, 0]).bool()), leaf


def of_singles(rows: Unpaired, beta: float) -> dict[str, Tensor]:
    good, ratio = rows.desirable, rows.policy - rows.reference
    return {
        "rewards/chosen": beta * ratio[good].mean(),
        "rewards/rejected": beta * ratio[~good].mean(),
        "logps/chosen": rows.policy[good].mean(),
        "logps/rejected": rows.policy[~good].mean(),
    }


@in_cuts
@pytest.mark.parametrize(("name", "kl"), [("kto", 2.4), ("kto", -2.4), ("apo_zero_unpaired", None)])
def test_kto(name, kl, cut):
    options = kto.KTOOptions(loss_type=name, beta=0.3, desirable_weight=0.5, undesirable_weight=2.0)
    rows, leaf = singles()
    shift = max((kl or 0.0) / 4, 0.0)
    gain = 0.3 * (rows.policy - rows.reference - shift)
    expected = torch.where(rows.desirable, 0.5 * (1 - torch.sigmoid(gain)), 2.0 * torch.sigmoid(gain)).sum() / ROWS
    counts = {"rows": ROWS, **({} if kl is None else {"kl": kl, "kl_rows": 4})}
    loss = partial(kto.loss, counts=counts, options=options)
    parts = [part_of(rows, each) for each in CUTS[cut]]
    assert_sums_to(loss, parts, leaf, expected, {**of_singles(rows, 0.3), "kl": shift})


def test_bco_compares_with_the_mean_of_all_rewards():
    options = bco.BCOOptions(beta=0.3, desirable_weight=0.5, undesirable_weight=2.0)
    rows, leaf = singles()
    running = bco.RunningMean(total=3.0, count=2.0)
    objective = bco.objective(options, running=running)
    assert objective.observe is not None
    objective.observe(rows)
    reward_ = 0.3 * (rows.policy - rows.reference)
    mean = ((3.0 + reward_.sum()) / (2 + ROWS)).item()
    assert running.value == pytest.approx(mean, rel=1e-12)
    losses = torch.where(rows.desirable, -0.5 * F.logsigmoid(reward_ - mean), -2.0 * F.logsigmoid(mean - reward_))
    loss = partial(objective.loss, counts={"rows": ROWS})
    assert_sums_to(loss, [rows], leaf, losses.sum() / ROWS, {**of_singles(rows, 0.3), "delta": mean})
    assert bco.RunningMean().value == 0.0


# -- classes ----------------------------------------------------------------------------------------------------------


@in_cuts
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
def test_classes_of_texts(problem, weighted, cut):
    leaf = numbers(ROWS, 3, seed=13, low=-2, high=2).requires_grad_()
    weights = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64) if weighted else None
    single, several = torch.tensor([2, 0, 1, 1, 0, 2]), numbers(ROWS, 3, seed=14, low=0, high=1)
    target = {"single_label_classification": single, "multi_label_classification": (several > 0.5).double()}.get(
        problem, several
    )
    w = torch.ones(3, dtype=torch.float64) if weights is None else weights
    total = w[single].sum() if problem.startswith("single") else ROWS * w.sum()
    logp = leaf - leaf.logsumexp(1, keepdim=True)
    expected, metrics = ((leaf - several) ** 2).sum() / total, {}
    if problem.startswith("single"):
        expected = -(w[single] * logp[range(ROWS), single]).sum() / total
        metrics["accuracy"] = (leaf.argmax(1) == single).double().mean()
    elif problem.startswith("multi"):
        expected = -((target * F.logsigmoid(leaf) + (1 - target) * F.logsigmoid(-leaf)) * w).sum() / total
        metrics["accuracy"] = ((leaf > 0) == target.bool()).all(1).double().mean()
    loss = partial(
        sequence_classification.LOSSES[problem], counts={"weights": total.item()}, weights=weights, smoothing=0.0
    )
    parts = [sequence_classification.LabelScores(leaf[each], target[each]) for each in CUTS[cut]]
    assert_sums_to(loss, parts, leaf, expected, metrics)


@in_cuts
def test_labels_of_tokens(cut):
    leaf = numbers(ROWS, 3, seed=22, low=-2, high=2).requires_grad_()
    target, weights = torch.tensor([2, 0, 1, 1, 0, 2]), torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    logp = leaf - leaf.logsumexp(1, keepdim=True)
    expected = -(weights[target] * logp[range(ROWS), target]).sum() / weights[target].sum()
    counts = {"weights": weights[target].sum().item()}
    loss = partial(token_classification.loss, counts=counts, weights=weights, smoothing=0.0)
    parts = [token_classification.TagScores(leaf[each], target[each]) for each in CUTS[cut]]
    assert_sums_to(loss, parts, leaf, expected, {"accuracy": (leaf.argmax(1) == target).double().mean()})


@in_cuts
def test_replaced_tokens(cut):
    """Of six masked tokens three were drawn right; the fourth position is padding."""
    leaf = numbers(2, ROWS, seed=23, low=-2, high=2).requires_grad_()
    logits = torch.cat([leaf[1, :1] * 0, leaf[1, 1:]])  # a logit of 0 says that nothing was replaced
    replaced, present = torch.tensor([0, 1, 1, 0, 0, 1]).bool(), torch.tensor([1, 1, 1, 0, 1, 1]).bool()
    lost = -torch.where(replaced, F.logsigmoid(logits), F.logsigmoid(-logits))
    generator, discriminator = -leaf[0], lost[present]
    right = (logits > 0) == replaced
    metrics = {
        "generator_loss": generator.mean(),
        "discriminator_loss": discriminator.mean(),
        "discriminator_accuracy": right[present].double().mean(),
        "discriminator_recall": right[present & replaced].double().mean(),
        "generator_accuracy": 1 - replaced.sum() / ROWS,
    }

    def loss(part: slice) -> Outcome:
        stats = {"logprobs": leaf[0, part], "all_logits": logits[part]}
        stats |= {"replaced": replaced[part], "present": present[part]}
        found = replaced_token_detection.read_detections(None, stats, None)  # type: ignore[arg-type]
        return replaced_token_detection.loss(found, {"masked": ROWS, "tokens": 5}, weight=50.0, metrics=True)

    assert_sums_to(loss, CUTS[cut], leaf, generator.mean() + 50 * discriminator.mean(), metrics)


# -- completions that the policy wrote --------------------------------------------------------------------------------

LENGTHS = [3, 1, 0, 4, 2, 5]
"""Tokens of each completion; one has none to learn from."""
TOKENS = sum(LENGTHS)
BOUNDS = [sum(LENGTHS[:row]) for row in range(ROWS + 1)]
WRITTEN_COUNTS = {"completions": ROWS, "scores": TOKENS, "kept": 9}


def written() -> tuple[Written, Tensor]:
    leaf = numbers(2, TOKENS, seed=15, low=-2.0, high=-0.1).requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5, 0.7, -0.3], dtype=torch.float64)
    completion = torch.repeat_interleave(torch.arange(ROWS), torch.tensor(LENGTHS))
    moved = torch.tensor([0, 0.6, 0, 0, -0.6, 0], dtype=torch.float64)[completion]  # beyond the bounds as a whole
    return Written(
        logprobs=leaf[0],
        old=leaf[0].detach() + moved + numbers(TOKENS, seed=16, low=-0.6, high=0.6),
        advantages=advantages[completion],
        completion=completion,
        lengths=torch.tensor(LENGTHS, dtype=torch.float64),
        window_tokens=torch.full((TOKENS,), 11.0, dtype=torch.float64),
        sampled=leaf[0].detach() + numbers(TOKENS, seed=17, low=-0.6, high=0.6),
        reference=leaf[0].detach() + numbers(TOKENS, seed=18, low=-0.5, high=0.5),
        entropies=-leaf[1],
    ), leaf


def completions_of(rows: Written, part: slice) -> Written:
    """Some completions, numbered from 0."""
    values = {each.name: getattr(rows, each.name) for each in dataclasses.fields(rows)}
    tokens = slice(BOUNDS[part.start], BOUNDS[part.stop])
    whole = ("lengths", "log_correction")
    found = {
        name: None if value is None else value[part if name in whole else tokens] for name, value in values.items()
    }
    return Written(**{**found, "completion": found["completion"] - part.start})


def of_each(rows: Written, values: Tensor) -> list[Tensor]:
    return [values[BOUNDS[row] : BOUNDS[row + 1]] for row in range(ROWS)]


GRPO: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in policy_gradient.LOSSES},
    "whole completions": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "two bounds": {"loss_type": "dapo", "epsilon_high": 0.4, "delta": 1.5},
    "reference": {"loss_type": "bnpo", "beta": 0.3},
    "plain divergence": {"loss_type": "dr_grpo", "beta": 0.3, "use_bias_correction_kl": False},
    "geometric mean, narrow": {"loss_type": "gmpo", "epsilon": 0.05, "epsilon_high": 0.1, "beta": 0.3},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.2},
    "left behind": {"loss_type": "grpo", "off_policy_mask_threshold": 0.02},
    "other gates": {"loss_type": "sapo", "sapo_temperature_neg": 2.0, "sapo_temperature_pos": 0.5},
    "other kernels": {
        "loss_type": "vespo",
        **{"vespo_k_pos": 1.5, "vespo_k_neg": 2.5, "vespo_lambda_pos": 1.2, "vespo_lambda_neg": 0.7},
    },
}


def plain_loss(rows: Written, options: Any, ratio: list[Tensor], row: int) -> Tensor:
    """The losses of the tokens of one completion."""
    r, a, logps = ratio[row], of_each(rows, rows.advantages)[row], of_each(rows, rows.logprobs)[row]
    upper = options.epsilon if options.epsilon_high is None else options.epsilon_high
    name = options.loss_type
    if name == "cispo":
        return -r.clamp(max=upper).detach() * a * logps
    if name == "sapo":
        t = options.sapo_temperature_pos if a[0] > 0 else options.sapo_temperature_neg
        return -4 / t / (1 + torch.exp(-t * (r - 1))) * a
    if name == "vespo":
        weight = of_each(rows, rows.logprobs - rows.old)[row].sum().exp().detach()
        k, lam = (
            (options.vespo_k_pos, options.vespo_lambda_pos)
            if a[0] > 0
            else (options.vespo_k_neg, options.vespo_lambda_neg)
        )
        return -(weight**k * torch.exp(lam * (1 - weight))) * a * logps
    if name == "gmpo":
        logs, own = r.log(), torch.ones_like(r) if rows.kept is None else of_each(rows, rows.kept)[row].to(r)
        inside = logs.clamp(max=upper) if a[0] > 0 else logs.clamp(min=-options.epsilon)
        taken = max(own.sum().item(), 1.0)
        return -a * ((inside * own).sum() / taken).exp() * len(r) / taken
    bounded = r if options.delta is None else r.clamp(max=options.delta)
    within = r.clamp(1 - options.epsilon, 1 + upper)
    return -torch.minimum(bounded * a, within * a)


def divisor(options: Any, row: int) -> float:
    name = options.loss_type
    if name in ("grpo", "sapo", "gmpo"):
        return max(LENGTHS[row], 1) * ROWS
    if name in ("dapo", "cispo", "vespo"):
        return 11.0
    return {"bnpo": float(TOKENS), "dr_grpo": ROWS * float(options.max_completion_length), "luspo": float(ROWS)}[name]


@in_cuts
@pytest.mark.parametrize("held", [False, True], ids=["", "some tokens corrected"])
@pytest.mark.parametrize("name", GRPO)
def test_grpo(name, held, cut):
    options = grpo.GRPOOptions(max_completion_length=20, **GRPO[name])
    rows, leaf = written()
    if held:
        kept = torch.arange(TOKENS) % 5 < 3
        rows = dataclasses.replace(rows, kept=kept, correction=numbers(TOKENS, seed=19, low=0.5, high=1.5))
    logs = of_each(rows, rows.logprobs - rows.old)
    by_completion = options.importance_sampling_level == "sequence"
    ratio = [each.mean().exp().expand(len(each)) if by_completion else each.exp() for each in logs]
    upper, total, metrics = options.upper, torch.zeros((), dtype=torch.float64), {}
    taking = torch.ones(TOKENS, dtype=torch.float64) if rows.kept is None else rows.kept.double()
    distances = []
    for row in [row for row in range(ROWS) if LENGTHS[row]]:
        losses = plain_loss(rows, options, ratio, row)
        threshold = options.off_policy_mask_threshold
        behind = of_each(rows, rows.sampled - rows.logprobs)[row].mean()
        if threshold is not None and of_each(rows, rows.advantages)[row][0] < 0 and behind > threshold:
            losses = losses * 0
        losses = losses * of_each(rows, taking)[row]
        if held and options.loss_type != "vespo":
            losses = losses * of_each(rows, rows.correction)[row]
        ahead = of_each(rows, rows.reference - rows.logprobs)[row]
        distance = (ahead.exp() - ahead - 1) * (ratio[row] if options.use_bias_correction_kl else 1)
        distances.append(distance)
        total = total + ((losses + options.beta * distance) / divisor(options, row)).sum()
    if options.beta:
        metrics["kl"] = torch.cat(distances).mean()
    if options.entropy_coef:
        metrics["policy_loss"] = total
        total = total - options.entropy_coef * (rows.entropies * taking).sum() / WRITTEN_COUNTS["kept"]
    every = torch.cat(ratio)
    gained = rows.advantages > 0
    if options.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = ((every > upper) & gained).double().mean()
    elif options.loss_type == "vespo":
        weights = [-plain_loss(rows, options, ratio, row) / of_each(rows, rows.advantages * rows.logprobs)[row]
                   for row in range(ROWS) if LENGTHS[row]]  # fmt: skip
        metrics["vespo/phi_seq_mean"] = torch.stack([each[0] for each in weights]).mean()
    elif options.loss_type == "gmpo":
        low, high = (every.log() < -options.epsilon) & ~gained, (every.log() > upper) & gained
        metrics |= clip_shares(rows, low, high, by_completion)
    elif options.loss_type != "sapo":
        bounded = every if options.delta is None else every.clamp(max=options.delta)
        low, high = (bounded < 1 - options.epsilon) & ~gained, (bounded > 1 + upper) & gained
        metrics |= clip_shares(rows, low, high, by_completion)
    loss = partial(grpo.loss, counts=WRITTEN_COUNTS, options=options, control=grpo.EntropyControl(options))
    assert_sums_to(loss, [completions_of(rows, each) for each in CUTS[cut]], leaf, total, metrics)


def few_tokens(ratio: list[float], advantages: list[float]) -> tuple[Written, Tensor]:
    """Of completions of one token, of none, and of three."""
    ratios, completion = torch.tensor(ratio), torch.tensor([0, 2, 2, 2])
    lengths, ones = torch.tensor([1.0, 0.0, 3.0]), torch.ones(4)
    return Written(ratios.log(), 0 * ones, torch.tensor(advantages), completion, lengths, *[ones] * 4), ratios


@pytest.mark.parametrize(
    ("ratio", "advantages", "expected"),
    [
        ([1.5, 1.0, 1.0, 0.5], [1.0, -1.0, -1.0, -1.0], (0.0, 1.0)),
        ([1.5, 1.0, 1.0, 0.5], [-1.0, 1.0, 1.0, 1.0], (0.0, 0.0)),
        ([0.5] * 4, [-1.0] * 4, (1.0, 0.0)),
        ([1.5] * 4, [1.0] * 4, (0.0, 1.0)),
    ],
)
def test_shares_that_are_clipped_are_of_completions_with_tokens(ratio, advantages, expected):
    written, ratios = few_tokens(ratio, advantages)
    beyond = policy_gradient.beyond_clip(written, ratios, grpo.GRPOOptions())
    _, lows, highs = policy_gradient.clip_metrics(written, *beyond, "token")
    assert (lows["clip_ratio/low_min"].item(), highs["clip_ratio/high_max"].item()) == expected


@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
def test_gamma_weights_bound_the_ratio_of_each_token_first(advantage):
    """An advantage of 0 has the weights of those above."""
    rows, _ = few_tokens([1.5, math.exp(40.0), math.exp(-10.0), math.exp(-10.5)], [advantage] * 4)
    options = grpo.GRPOOptions(vespo_k_pos=1.5, vespo_k_neg=2.5, vespo_lambda_pos=1.2, vespo_lambda_neg=0.7)
    power, decay = (2.5, 0.7) if advantage < 0 else (1.5, 1.2)
    one, other = ((each**power) * math.exp(decay * (1 - each)) for each in (1.5, math.exp(20.0 - 10.0 - 10.5)))
    found = policy_gradient.gamma_weights(rows, options)
    torch.testing.assert_close(found, torch.tensor([one, other, other, other]), rtol=1e-4, atol=0)


def clip_shares(rows: Written, low: Tensor, high: Tensor, by_completion: bool) -> dict[str, Tensor]:
    """Shares of tokens, or the means of those of completions; the smallest and the largest share of a completion."""
    assert low.any()
    assert high.any()

    def shares(flags: Tensor) -> Tensor:
        return torch.stack([each.double().mean() for each in of_each(rows, flags) if len(each)])

    means = {"low_mean": low, "high_mean": high, "region_mean": low | high}
    found = {name: shares(each).mean() if by_completion else each.double().mean() for name, each in means.items()}
    found |= {"low_min": shares(low).min(), "high_max": shares(high).max()}
    return {f"clip_ratio/{name}": value for name, value in found.items()}


def test_the_weight_of_entropy_follows_its_target():
    options = grpo.GRPOOptions(
        use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=0.5, entropy_coef_delta=0.04, entropy_coef_max=0.13,
        entropy_coef_min=0.07,
    )  # fmt: skip
    object.__setattr__(options, "device", CPU)
    control = grpo.EntropyControl(options)
    rows, _ = written()
    for entropy, coefficient, applied in ((0.3, 0.13, 0.13), (0.5, 0.13, 0.13), (0.6, 0.09, 0.0), (0.7, 0.07, 0.0)):
        kept = torch.arange(TOKENS) < 9
        spread = torch.where(kept, entropy, 100.0).double()
        control.observe(dataclasses.replace(rows, entropies=spread, kept=kept))
        control.follow(options)
        assert control.coefficient == pytest.approx(coefficient)
        assert control.entropy == pytest.approx(entropy)
        assert control.applied(options) == pytest.approx(applied)


@in_cuts
def test_rloo(cut):
    options = rloo.RLOOOptions(epsilon=0.2, epsilon_high=0.3)
    rows, leaf = written()
    ratio = torch.stack([each.sum().exp() for each in of_each(rows, rows.logprobs - rows.old)])
    advantage = torch.stack([each[0] if len(each) else each.sum() for each in of_each(rows, rows.advantages)])
    within = ratio.clamp(0.8, 1.3)
    expected = -torch.minimum(ratio * advantage, within * advantage).sum() / ROWS
    some = torch.tensor(LENGTHS) > 0
    low, high = ((ratio < 0.8) & (advantage < 0))[some], ((ratio > 1.3) & (advantage > 0))[some]
    assert 0 < low.sum() < 5
    assert 0 < high.sum() < 5
    metrics = {
        "clip_ratio/low_mean": low.double().mean(),
        "clip_ratio/high_mean": high.double().mean(),
        "clip_ratio/region_mean": (low | high).double().mean(),
        "clip_ratio/low_min": low.double().min(),
        "clip_ratio/high_max": high.double().max(),
    }
    loss = partial(rloo.loss, counts=WRITTEN_COUNTS, options=options)
    assert_sums_to(loss, [completions_of(rows, each) for each in CUTS[cut]], leaf, expected, metrics)


@in_cuts
def test_ppo(cut):
    """Half of the tokens take part."""
    options = ppo.PPOOptions(cliprange=0.2, cliprange_value=0.25, vf_coef=0.5)
    leaf = numbers(3, ROWS, seed=20, low=-1, high=1).requires_grad_()
    old, advantages, before, returns = numbers(4, ROWS, seed=21, low=-1, high=1)
    kept = torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    both = ppo.ActedAndExpected(
        Acted(leaf[0], old, advantages, kept, leaf[2]), Expected(leaf[1], before, returns, kept)
    )
    ratio = (leaf[0] - old).exp()
    plain, within = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    near = before + (leaf[1] - before).clamp(-0.25, 0.25)
    error, other = (leaf[1] - returns) ** 2 / 2, (near - returns) ** 2 / 2
    policy, value = torch.maximum(plain, within)[kept].mean(), torch.maximum(error, other)[kept].mean()
    metrics = {
        "policy/approxkl_avg": ((leaf[0] - old) ** 2 / 2)[kept].mean(),
        "policy/clipfrac_avg": (within > plain)[kept].double().mean(),
        "loss/policy_avg": policy,
        "val/ratio": ratio[kept].mean(),
        "policy/entropy_avg": leaf[2][kept].mean(),
        "loss/value_avg": value,
        "val/clipfrac_avg": (other > error)[kept].double().mean(),
    }
    loss = partial(ppo.both_losses, counts={"kept": 4}, options=options)
    assert_sums_to(loss, [part_of(both, each) for each in CUTS[cut]], leaf, policy + 0.5 * value, metrics)


def test_nothing_written_is_no_loss():
    rows, _ = written()
    empty = completions_of(rows, slice(2, 3))
    found = grpo.loss(empty, {"completions": 1, "scores": 0, "kept": 0}, options=grpo.GRPOOptions(), control=None)  # type: ignore[arg-type]
    assert found.loss.item() == 0.0
    assert not math.isnan(rloo.loss(empty, {"completions": 1}, options=rloo.RLOOOptions()).loss.item())
