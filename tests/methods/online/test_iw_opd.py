"""Importance-weighted on-policy distillation: TRL's loss and gradients, whole and in parts, and what a run does."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowtide
from lowtide.methods.online import iw_opd
from lowtide.methods.online.policy import Sampled
from tests.support.models.classifiers import classifier
from tests.support.references.parity_world import lora
from tests.support.runs.distilling import build_teacher
from tests.support.runs.online_runs import assert_near, online, trained, weights

LENGTHS, VOCAB = (5, 1, 7, 3), 11


def test_loss_and_gradients_are_those_of_trl():
    theirs = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer").IWOPDTrainer
    drawn = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 4, 7, VOCAB, dtype=torch.float64, generator=drawn)
    student.requires_grad_()
    tokens = torch.randint(VOCAB, (4, 7), generator=drawn)
    there = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    of_teacher = (teacher / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    mock: Any = SimpleNamespace(temperature=0.7, iw_opd_gamma=0.8, iw_opd_epsilon=1e-8)
    mock.model, mock._metrics = SimpleNamespace(training=True), {"train": defaultdict(list)}
    labels = tokens.masked_fill(~there, -100)
    expected = theirs._compute_iw_opd_loss(mock, student, tokens, labels, of_teacher, num_items_in_batch=16)
    (of_logits,) = torch.autograd.grad(expected, student)

    logprobs = (student / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0][there]
    completion = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    sampled = Sampled(logprobs, of_teacher[there].detach(), completion)
    options = iw_opd.IWOPDOptions(iw_opd_gamma=0.8)
    found = iw_opd.loss(sampled, {"scores": 16}, options=options)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found.loss, student, retain_graph=True)[0], of_logits)
    for name, values in mock._metrics["train"].items():
        kind = found.lows if "min" in name else found.highs
        ours = found.means[name].total / found.means[name].count if name in found.means else kind[name]
        assert float(ours) == pytest.approx(values[0], rel=1e-12)

    parts = [torch.isin(completion, torch.tensor(rows)) for rows in ((2, 0), (3, 1))]
    of_parts = [Sampled(logprobs[p], sampled.teacher[p], completion[p]) for p in parts]
    total: Any = sum(iw_opd.loss(each, {"scores": 16}, options=options).loss for each in of_parts)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


def test_weights_are_those_of_the_formula():
    ahead = torch.tensor([1.0, -3.0, 0.0, 4.0, 0.0, 2.0])
    found = iw_opd.position_weights(ahead, torch.tensor([1, 1, 1, 1, 0, 0]), gamma=0.5, epsilon=1e-8)
    assert found.tolist() == pytest.approx([1.5, 1 + 0.5 * 7 / 8, 1 + 0.5 * 4 / 8, 1 + 0.5 * 4 / 8, 1.5, 1.5])
    assert iw_opd.position_weights(torch.zeros(2), torch.zeros(2).long(), gamma=0.5, epsilon=1e-8).tolist() == [1.5] * 2
    assert len(iw_opd.position_weights(torch.zeros(0), torch.zeros(0).long(), gamma=0.5, epsilon=1e-8)) == 0


def test_micro_batches_pieces_and_repeated_prompts_change_nothing(tmp_path):
    options = {"max_steps": 1, "num_generations": 2, "max_completion_length": 6, "max_grad_norm": 0.0, "optim": "sgd"}
    expected = weights(trained(tmp_path / "whole", "IWOPD", **options))
    for number, way in enumerate(
        [{"tokens_per_microbatch": 40, "prefix_sharing": False}, {"tokens_per_microbatch": 16}]
    ):
        assert_near(weights(trained(tmp_path / f"parts {number}", "IWOPD", **options, **way)), expected)


@pytest.mark.parametrize("teaches", [True, False])
def test_adapters_alone_learn_of_a_teacher_which_the_student_without_them_may_be(teaches, tmp_path):
    arguments = {"peft_config": lora(), "teacher_model": build_teacher() if teaches else None}
    trainer = online(tmp_path, "IWOPD", arguments=arguments, max_steps=1, max_completion_length=4, learning_rate=0.1)
    before = weights(trainer)
    trainer.train()
    changed = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert all("lora_" in name for name in changed)
    apart = trainer.state.log_history[0]["iw_opd/mean_abs_advantage"]
    assert apart > 0.01 if teaches else apart == pytest.approx(0, abs=1e-6)


def test_what_cannot_work_is_refused(tmp_path):
    for options, said in (
        ({"distillation_objective": "jsd"}, "distillation_objective='jsd'"),
        ({"iw_opd_gamma": -1}, "iw_opd_gamma=-1"),
        ({"iw_opd_epsilon": 0}, "iw_opd_epsilon=0"),
        ({"temperature": 0}, "temperature=0"),
    ):
        with pytest.raises(ValueError, match=said):
            lowtide.IWOPDConfig(output_dir=str(tmp_path), use_cpu=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no teacher"):
        online(tmp_path, "IWOPD", arguments={"teacher_model": None})
    with pytest.raises(ValueError, match="which has no language-modelling head"):
        online(tmp_path, "IWOPD", arguments={"teacher_model": classifier(vocab_size=300)})
