"""Equal rewards teach nothing: the loss and every gradient are exactly 0, whatever divides advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.methods.online.learning import GroupRewards, Rewarded
from lowtide.methods.online.ppo import moments
from lowtide.objectives.ppo import whitened
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rollout import Rollout
from tests.support.marks import slow_but
from tests.support.runs.online_runs import LOSSES, loss_options, online, weights

WAYS: dict[str, dict[str, Any]] = {
    **{f"GRPO {name}": loss_options(name) for name in LOSSES},
    "GRPO scaled by the batch": {"scale_rewards": "batch"},
    "GRPO not scaled": {"scale_rewards": "none"},
    "GRPO, each function first": {"multi_objective_aggregation": "normalize_then_sum"},
    "GRPO, learned from twice": {"num_iterations": 2},
    "RLOO": {"beta": 0.0},
    "RLOO, normalized": {"beta": 0.0, "normalize_advantages": True},
}


def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1000.1] * len(completion_ids)


def constant_where_known(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if number % 3 == 1 else -12345.678 for number in range(len(completion_ids))]


def first(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.1 if number % 2 else 0.3 for number in range(len(completion_ids))]


def second(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.2 if number % 2 else 0.0 for number in range(len(completion_ids))]


REWARDS = {"one value": constant, "one value, where known": constant_where_known, "sums": [first, second]}


@pytest.mark.parametrize("rewards", slow_but(["one value"], REWARDS))
@pytest.mark.parametrize("way", slow_but([*WAYS][:2], WAYS))
def test_the_loss_and_every_gradient_are_0(way, rewards, tmp_path):
    if rewards == "sums" and "each function" in way:
        pytest.skip("the rewards of each function differ, and are normalized before they are added up")
    trainer = online(
        tmp_path,
        way.split()[0].rstrip(","),
        arguments={"reward_funcs": REWARDS[rewards]},
        **{"num_generations": 4, "per_device_train_batch_size": 12, "max_steps": 2, "weight_decay": 0.0, **WAYS[way]},
    )
    before = weights(trainer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logs] == [0.0, 0.0]
    assert [entry["grad_norm"] for entry in logs] == [0.0, 0.0]
    assert {entry.get("frac_reward_zero_std", 1.0) for entry in logs} == {1.0}
    assert logs[0]["frac_reward_zero_std"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    if rewards != "sums":
        assert all(entry.get("reward_std", 0.0) == 0.0 for entry in logs)


@pytest.mark.parametrize(
    "options", [{}, {"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}]
)
def test_groups_are_counted_that_have_no_spread(options, tmp_path):
    """Of two groups one differs."""

    def half(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [5.1] * 4 + [0.0, 1.0, 2.0, 3.0]

    trainer = online(tmp_path, arguments={"reward_funcs": half}, max_steps=1, **options)
    trainer.train()
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 0.5


def rewarded(lengths: list[int], rewards: list[float]) -> Rewarded:
    completions = [Completion([5] * n, [0.0] * n, [0.0] * n, [True] * n) for n in lengths]
    group = GroupRewards(torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(1), 1)
    return Rewarded(Rollout([[5]] * len(lengths), completions, 0), group, slice(0, len(lengths)), torch.device("cpu"))


@pytest.mark.parametrize("value", [1000.1, -12345.678, 1 / 3])
def test_whitening_leaves_nothing_of_equal_numbers(value):
    numbers = torch.full((7,), value, dtype=torch.float64)
    kept = torch.tensor([True] * 6 + [False])
    found = moments(numbers, kept, rewarded([7], [value]))
    assert found == (value, 0.0)
    assert whitened(numbers, *found).tolist() == [0.0] * 7
    assert whitened(numbers, *found, shift_mean=False).tolist() == [value] * 7


def test_pairs_whose_sums_differ_by_rounding_alone_are_equal(tmp_path):
    """Of two that are equal the first is chosen: 0.1 + 0.2 against 0.3 is."""
    trainer = online(
        tmp_path,
        "OnlineDPO",
        arguments={"reward_funcs": [first, second]},
        num_generations=2,
        per_device_train_batch_size=4,
    )
    rows = [dict(trainer.train_dataset[row]) for row in (0, 0, 1, 1)]
    made = trainer.maker.make(rows, (0, 0, 0), group=2, version=0)
    assert 0.3 + 0.0 < 0.1 + 0.2
    assert made.rollout.row_values["preference"].tolist() == [1, -1, 1, -1]
    assert made.advantages.tolist() == [0.0] * 4


# -- completions that were left out -----------------------------------------------------------------------------------


OF_COMPLETIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "vespo": ("GRPO", {"loss_type": "vespo", "vespo_lambda_pos": 1.3, "num_iterations": 2}, "vespo/phi_seq_mean"),
    "clips of whole completions": (
        "GRPO",
        {"importance_sampling_level": "sequence", "epsilon": 0.0, "num_iterations": 2, "learning_rate": 1e-2},
        "clip_ratio/region_mean",
    ),
    "RLOO": ("RLOO", {"epsilon": 0.0, "num_iterations": 2, "learning_rate": 1e-2}, "clip_ratio/region_mean"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_COMPLETIONS)
def test_a_mean_over_completions_leaves_out_those_that_were_cut_off(name, tmp_path, monkeypatch):
    """It is that of the others alone."""
    method, options, metric = OF_COMPLETIONS[name]
    options = {"mask_truncated_completions": True, "max_completion_length": 6, "max_steps": 2, **options}
    trainer = online(tmp_path, method, **options)

    def two_end(self: Any, rollout: Rollout, options: Any) -> None:
        rollout.learned = [number % 4 == 1 for number in range(len(rollout))]

    inner, taken = trainer.inner_objective.loss, []

    def seen(written: Any, counts: Any) -> Any:
        found = inner(written, counts)
        taken.append((written, found.means[metric]))
        return found

    monkeypatch.setattr(type(trainer.learning), "prepare", two_end)
    trainer.objective = replace(trainer.inner_objective, loss=seen)
    trainer.train()
    written, mean = taken[-1]
    assert (written.lengths == 0).sum() == 6
    assert float(mean.count) == 2.0
    assert float(mean.total) > 0
    assert trainer.state.log_history[1][metric] == pytest.approx(float(mean.total) / 2)
