"""An evaluation's completions and numbers are the same however many are written at a time, and on how many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.marks import slow_but
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.online_runs import online, prompts

METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"num_generations": 4, "num_generations_eval": 2},
    "GRPO grpo": {"num_generations": 4, "num_generations_eval": 2, "loss_type": "grpo"},
    "RLOO": {"num_generations": 2},
    "OnlineDPO": {"num_generations": 2},
    "PPO": {"num_generations": 1},
}
SAME = (
    "eval_reward",
    "eval_reward_std",
    "eval_rewards/even_tokens/mean",
    "eval_completions/mean_length",
    "eval_entropy",
    "eval_frac_reward_zero_std",
    "eval_kl",
    *(f"eval_objective/{name}" for name in ("scores", "scores_margin", "entropy", "kl", "rlhf_reward")),
)
LOSSES = ("GRPO", "GRPO grpo", "RLOO", "OnlineDPO")
"""Of PPO advantages are whitened over what is written at a time."""


def even_tokens(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """The same for all completions of the first prompt, which fills up the last batch of two ranks."""
    shares = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    return [share if n else 0.25 for share, n in zip(shares, number, strict=True)]


def evaluated(folder: Path, name: str, rows: int) -> dict[str, float]:
    arguments = {"reward_funcs": even_tokens}
    trainer = online(folder, name.split()[0], arguments=arguments, per_device_eval_batch_size=rows, **METHODS[name])
    found = trainer.evaluate(prompts(5))
    names = [*SAME, *(["eval_loss"] if name in LOSSES else [])]
    return {each: found[each] for each in names if each in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["GRPO"], METHODS))
def test_whatever_is_written_at_a_time(name, tmp_path):
    expected = evaluated(tmp_path / "whole", name, 10)
    assert evaluated(tmp_path / "parts", name, 2) == pytest.approx(expected, rel=1e-5)
    assert evaluated(tmp_path / "unequal", name, 4) == pytest.approx(expected, rel=1e-5)
    assert expected["eval_reward"] != 0


@pytest.mark.slow
def test_predict_writes_completions_as_evaluate_does(tmp_path):
    trainer = online(tmp_path, "GRPO", per_device_eval_batch_size=4, **METHODS["GRPO"])
    expected = trainer.evaluate(prompts(5))
    found = trainer.predict(prompts(5)).metrics
    assert expected["eval_reward"] != 0
    for name in expected.keys() & {*SAME, "eval_loss"}:
        assert found[name.replace("eval_", "test_", 1)] == expected[name]


def rank_main(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for name in METHODS:
            found = evaluated(Path(folder, name), name, 2)
            if rank == 0:
                torch.save(found, Path(folder, f"{name}.pt"))


@pytest.mark.slow
def test_however_many_ranks_write(tmp_path):
    run_ranks(rank_main, str(meeting_place(tmp_path)), ranks=2)
    for name in METHODS:
        expected = evaluated(tmp_path / f"one {name}", name, 10)
        assert torch.load(tmp_path / f"{name}.pt") == pytest.approx(expected, rel=1e-5), name
