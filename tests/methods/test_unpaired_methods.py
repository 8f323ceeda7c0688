"""KTO and BCO: baselines and running means of the whole batch, exact under any cut."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from lowtide.data.batches.collate import CompletionCollator
from lowtide.engine.reference import FrozenModel
from lowtide.methods.bco import METHOD as BCO
from lowtide.methods.bco import BCOOptions, RunningMean
from lowtide.methods.kto import METHOD as KTO
from lowtide.methods.kto import KTOOptions
from lowtide.step.evaluate import evaluate_batch
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.marks import slow_but
from tests.support.models.preference_models import (
    CUTS,
    assert_equal,
    dense,
    dense_logprobs,
    gradients,
    policy_and_reference,
    unpaired_rows,
)


def dense_ratios(made, column: str):
    policy, other = policy_and_reference()
    plain, theirs = dense(policy), dense(other)
    ratios = []
    for row in made:
        start = len(row["prompt_ids"]) - 1
        with torch.no_grad():
            referred = dense_logprobs(theirs, row["prompt_ids"], row[column])[start:].sum()
        ratios.append(dense_logprobs(plain, row["prompt_ids"], row[column])[start:].sum() - referred)
    return plain, torch.stack(ratios)


def run(objective, made, limits, sharing, columns=("completion_ids", "kl_completion_ids")):
    policy, other = policy_and_reference()
    policy = copy.deepcopy(policy)
    batch = CompletionCollator(columns, sharing=sharing, values=("label",))(made)
    totals = Totals()
    models = Models(policy, FrozenModel(other, padding_free=True))
    loss = train_step(models, batch, objective, limits=limits, totals=totals)
    return loss.item(), gradients(policy), totals.read(torch.device("cpu"))


@pytest.mark.parametrize("labels", slow_but(["10010110"], ["10010110", "11111111", "00000000"]))
@pytest.mark.parametrize("sharing", [True, False])
def test_ktos_baseline_is_of_the_whole_batch(sharing, labels):
    made = unpaired_rows(labels)
    plain, ratios = dense_ratios(made, "completion_ids")
    _, strange = dense_ratios(made, "kl_completion_ids")
    baseline = strange.detach().mean().clamp(min=0)
    desirable = torch.tensor([row["label"] for row in made])
    value = torch.where(desirable, torch.sigmoid(0.3 * (ratios - baseline)), torch.sigmoid(0.3 * (baseline - ratios)))
    expected = (torch.where(desirable, 1.5, 0.5) * (1 - value)).mean()
    expected.backward()
    options = KTOOptions(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    for limits in CUTS:
        loss, ours, metrics = run(KTO.objective(options), made, limits, sharing)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert metrics["kl"] == pytest.approx(baseline.item(), rel=1e-6)
        assert ("rewards/chosen" in metrics) == desirable.any().item()
        if desirable.any():
            assert metrics["rewards/chosen"] == pytest.approx(0.3 * ratios[desirable].mean().item(), rel=1e-6)
        assert_equal(ours, gradients(plain))


def test_apo_zero_unpaired_has_no_baseline():
    made = unpaired_rows()
    plain, ratios = dense_ratios(made, "completion_ids")
    desirable = torch.tensor([row["label"] for row in made])
    expected = torch.where(desirable, 1 - torch.sigmoid(0.1 * ratios), torch.sigmoid(0.1 * ratios)).mean()
    expected.backward()
    objective = KTO.objective(KTOOptions(loss_type="apo_zero_unpaired"))
    loss, ours, _ = run(objective, made, Limits(rows=3), True, ("completion_ids",))
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_equal(ours, gradients(plain))


@pytest.mark.slow
def test_bcos_running_mean_goes_on_from_batch_to_batch():
    made = unpaired_rows()
    plain, ratios = dense_ratios(made, "completion_ids")
    desirable = torch.tensor([row["label"] for row in made])
    rewards = 0.1 * ratios
    mean = torch.cat([torch.tensor([2.0, 3.0]), rewards.detach()]).mean()
    expected = -torch.where(desirable, F.logsigmoid(rewards - mean), F.logsigmoid(mean - rewards)).mean()
    expected.backward()
    for limits in CUTS:
        running = RunningMean()
        running.take_in(torch.tensor([2.0, 3.0]))
        objective = BCO.objective(BCOOptions(), running=running)
        loss, ours, _ = run(objective, made, limits, True, ("completion_ids",))
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert running.count == 10
        assert_equal(ours, gradients(plain))


def test_evaluation_leaves_bcos_running_mean_alone():
    policy, other = policy_and_reference()
    running = RunningMean()
    objective = BCO.objective(BCOOptions(), running=running)
    batch = CompletionCollator(("completion_ids",), values=("label",))(unpaired_rows())
    totals = Totals()
    evaluate_batch(Models(policy, FrozenModel(other, padding_free=True)), batch, objective, totals)
    assert running.count == 0
    assert totals.read(torch.device("cpu"))["loss"] > 0
