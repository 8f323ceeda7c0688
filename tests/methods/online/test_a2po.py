"""Optimal advantage regression: values of prompts, the loss, and what a run does before it trains. Values and steps are
compared with TRL's in `tests/parity/test_optimal_value_parity.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lowtide
from lowtide.methods.online.a2po import Likelier, all_failed, loss
from lowtide.objectives.advantages import optimal_values
from tests.support.runs.online_runs import assert_near, online, prompts, trained, weights

OPTIONS: dict[str, Any] = {"max_steps": 1, "num_generations": 1, "num_value_samples": 2, "max_completion_length": 4}
OPTIONS |= {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 1.0, "beta2": 0.1}


def third(number: list[int], **_: Any) -> list[float]:
    """Rewards all completions of every third prompt."""
    return [float(n % 3 == 0) for n in number]


def test_values_of_prompts():
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, nan, nan], [nan, nan, nan], [3.0, 3.0, 3.0]])
    found = optimal_values(rewards, beta=0.5)
    expected = [0.5 * math.log((2 * math.exp(2) + 1) / 3), 0.0, 1.0, nan, 3.0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert optimal_values(torch.tensor([[2000.0, 0.0]]), beta=1.0).item() == pytest.approx(2000 - math.log(2))
    assert all_failed(rewards).tolist() == [False, True, False, True, False]


def test_the_loss_is_the_squared_error_of_what_is_known():
    ahead = torch.tensor([2.0, -1.0, 5.0], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0.5, -0.2, math.nan], dtype=torch.float64)
    found = loss(Likelier(ahead, target), {"completions": 4}, beta=0.1)
    expected = ((0.1 * ahead[0] - 0.5) ** 2 + (0.1 * ahead[1] + 0.2) ** 2) / 4
    torch.testing.assert_close(found.loss, expected)
    (gradient,) = torch.autograd.grad(found.loss, ahead)
    torch.testing.assert_close(gradient, torch.tensor([-0.015, 0.005, 0.0], dtype=torch.float64))
    assert found.means["advantage"].total / found.means["advantage"].count == pytest.approx(0.15)


@pytest.mark.slow
def test_prompts_without_a_reward_are_left_out_and_rows_may_bring_values(tmp_path):
    arguments = {"reward_funcs": third, "eval_dataset": prompts(4)}
    trainer = online(tmp_path, "A2PO", arguments=arguments, per_device_train_batch_size=5, **OPTIONS)
    assert trainer.train_dataset["number"] == [0, 3, 6, 9, 12, 15, 18, 21]
    assert trainer.train_dataset["optimal_value"] == pytest.approx([1.0] * 8)
    assert trainer.eval_dataset["optimal_value"] == pytest.approx([1.0, 0.0, 0.0, 1.0])
    brought = prompts(8).map(lambda row: {"optimal_value": 0.1 * row["number"]})
    trainer = online(tmp_path, "A2PO", arguments=arguments | {"train_dataset": brought}, **OPTIONS)
    assert trainer.train_dataset["optimal_value"] == brought["optimal_value"]
    trainer.train()
    with pytest.raises(ValueError, match="no column `optimal_value`, of what the policy wrote before training"):
        trainer.evaluate(prompts(4))
    assert trainer.evaluate(brought.select(range(4)))["eval_v_star"] == pytest.approx(0.15)


@pytest.mark.slow
def test_windows_micro_batches_and_pieces_change_nothing(tmp_path):
    whole = trained(tmp_path / "whole", "A2PO", **OPTIONS)
    parts = trained(tmp_path / "parts", "A2PO", **OPTIONS, tokens_per_microbatch=16, tokens_per_generation_batch=200)
    assert parts.train_dataset["optimal_value"] == whole.train_dataset["optimal_value"]
    assert_near(weights(parts), weights(whole))
    other = online(tmp_path / "other", "A2PO", per_device_train_batch_size=3, **OPTIONS)
    assert other.train_dataset["optimal_value"] == whole.train_dataset["optimal_value"]


def test_what_cannot_work_is_refused(tmp_path):
    for options, said in (
        ({"sync_ref_model": True}, "sync_ref_model=True moves the reference"),
        ({"beta2": 0.0}, "beta2=0"),
        ({"beta1": 0.0}, "beta1=0"),
        ({"vllm_importance_sampling_correction": True}, "no importance ratio"),
    ):
        with pytest.raises(ValueError, match=said):
            lowtide.A2POConfig(output_dir=str(tmp_path), use_cpu=True, **options)  # type: ignore[arg-type]
    arguments = {"reward_funcs": third, "train_dataset": prompts(3).select([1, 2])}
    with pytest.raises(ValueError, match="of 2 completions of each of its 2 prompts none has a reward other than 0"):
        online(tmp_path, "A2PO", arguments=arguments, **OPTIONS)
    with pytest.raises(ValueError, match="is a stream, and 2 completions of each prompt are written before training"):
        online(tmp_path, "A2PO", arguments={"train_dataset": prompts().to_iterable_dataset()}, **OPTIONS)
