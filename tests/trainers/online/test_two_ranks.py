"""Two and four processes with gloo against one: every loss, pairs, and advantages of the tokens of all ranks; with rows
of their own, and where two of them split sequences, of which each then writes a share."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engine.forward import causal_model
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.weights.sharded.stages import gathered_weights
from lowtide.ranks.shards import whole_of
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.references.parity_world import lora
from tests.support.runs.online_runs import (
    LOSSES,
    assert_near,
    even_tokens,
    every_third_token,
    loss_options,
    online,
    spread_where_even,
    told_prompts,
    trained,
    weights,
)

pytestmark = pytest.mark.slow
METHODS = {
    **{f"GRPO {name}": {"num_generations": 2, "beta": 0.1, **loss_options(name)} for name in LOSSES},
    "GRPO scaled by the batch": {"num_generations": 2, "scale_rewards": "batch", "num_iterations": 2},
    "GRPO whose prompts are replaced": {
        "num_generations": 2,
        "dynamic_sampling_rounds": 3,
        "arguments": {"reward_funcs": spread_where_even},
    },
    "GRPO with replayed groups": {
        "num_generations": 2,
        "replay_buffer_size": 3,
        "arguments": {"reward_funcs": spread_where_even},
    },
    "GRPO of steps": {"num_generations": 4, "arguments": {"reward_funcs": [every_third_token, even_tokens]}},
    "GRPO of steps whose prompts are replaced": {
        "num_generations": 2,
        "dynamic_sampling_rounds": 2,
        "arguments": {"reward_funcs": every_third_token},
    },
    "PPO of steps": {"num_generations": 1, "arguments": {"reward_funcs": [every_third_token, even_tokens]}},
    "OnlineDPO": {"num_generations": 2, "missing_eos_penalty": 0.5},
    "PPO": {"num_generations": 1, "num_ppo_epochs": 2, "whiten_rewards": True},
    "PPO with an adapter of values": {
        "num_generations": 1,
        "num_ppo_epochs": 2,
        "value_adapter": True,
        "arguments": {"peft_config": lora()},
    },
    "RLOO": {"num_generations": 2, "normalize_advantages": True},
    "Distillation": {"num_generations": 2, "beta": 0.5},
    "IWOPD": {"num_generations": 2},
    "SDFT": {"num_generations": 2, "teacher_model_kind": "ema", "arguments": {"train_dataset": told_prompts()}},
    "A2PO": {"num_generations": 1, "num_value_samples": 3, "beta2": 0.1},
    "SDPO of groups on both": {"num_generations": 4, "distillation_weight": 0.5, "success_reward_threshold": 0.5},
    "SDPO of distributions": {
        **{"num_generations": 4, "distillation_weight": 0.5, "success_reward_threshold": 0.5},
        **{"distillation_mode": "full_logits", "distillation_alpha": 0.5},
    },
    "GRPO of the least certain tokens": {"num_generations": 2, "top_entropy_quantile": 0.5},
}


SOME = (
    *("GRPO scaled by the batch", "GRPO of the least certain tokens", "OnlineDPO", "PPO"),
    "PPO with an adapter of values",
)
SEQUENCES, LAYERS = {"parallelism_config": {"sp_size": 2}}, {"parallelism_config": {"tp_size": 2}}
STAGES = {"pipeline_parallel_size": 2}
PIECES = {"tokens_per_microbatch": 20}
WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "rows of their own": (2, 2, {}),
    "shards, pieces": (2, 2, {"fsdp": True, **PIECES}),
    "split sequences, two of four": (4, 2, SEQUENCES),
    "split sequences, two of four, one row": (4, 1, SEQUENCES),
    "split sequences, shards, pieces": (2, 4, {**SEQUENCES, "fsdp": True, **PIECES}),
    "split layers, two of four": (4, 2, LAYERS),
    "split layers, shards": (4, 2, {**LAYERS, "fsdp": True}),
    "split layers, pieces": (2, 4, {**LAYERS, **PIECES}),
    "layers of their own": (2, 4, STAGES),
    "layers of their own, two of four": (4, 2, STAGES),
}
"""(ranks, rows on each, options). Two ranks that hold the same rows and split sequences write a share each, and of one
row both write all; those that split layers, or have layers of their own, write every token together."""


def learned(folder: Path, name: str, rows: int, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after some steps, of so many rows on each rank."""
    trainer = trained(folder, name.split()[0], per_device_train_batch_size=rows, **{**METHODS[name], **options})
    if (stage := stage_of(causal_model(trainer.model))) is not None:
        return gathered_weights(trainer.model, dict(stage.whole.named_parameters()), keep=True)
    return {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}


@functools.cache
def on_one_rank(name: str, rows: int) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return learned(Path(folder), name, rows)


def methods_of(way: str) -> list[str]:
    """All of them where ranks have rows of their own, elsewhere some that differ in what ranks exchange."""
    return list(METHODS if way == "rows of their own" else SOME)


def rank_main(rank: int, folder: str, way: str) -> None:
    place, (ranks, rows, options) = Path(folder), WAYS[way]
    with rank_of(place, rank, ranks):
        for name in methods_of(way):
            found = learned(place / name, name, rows, **options)
            if rank == 0:
                torch.save(found, place / f"{name}.pt")


@pytest.mark.parametrize("way", WAYS)
def test_ranks_learn_what_one_does(way, tmp_path):
    ranks, rows, options = WAYS[way]
    run_ranks(rank_main, str(meeting_place(tmp_path)), way, ranks=ranks)
    copies = 2 if {"parallelism_config", "pipeline_parallel_size"} & options.keys() else 1
    for name in methods_of(way):
        assert_near(torch.load(tmp_path / f"{name}.pt"), on_one_rank(name, rows * ranks // copies), 1e-5)


EQUAL: dict[str, dict[str, Any]] = {
    **{f"GRPO {name}": loss_options(name) for name in LOSSES},
    **{f"GRPO scaled by {scale}": {"scale_rewards": scale} for scale in ("group", "batch", "none")},
    "GRPO, each function first": {"multi_objective_aggregation": "normalize_then_sum"},
    "GRPO, learned from twice": {"num_iterations": 2},
    "RLOO": {"beta": 0.0},
    "RLOO, normalized": {"beta": 0.0, "normalize_advantages": True},
}
GROUP = 4
"""Completions of a prompt: a rank has one and a half such groups, so that one lies on both ranks."""


def equal_rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1000.1] * len(completion_ids)


def equal_rank_main(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, options in EQUAL.items():
            trainer = online(
                *(place / name, name.split()[0].rstrip(",")),
                arguments={"reward_funcs": equal_rewards},
                **{"num_generations": GROUP, "per_device_train_batch_size": 6, "max_steps": 2, "weight_decay": 0.0},
                **options,
            )
            before = weights(trainer)
            trainer.train()
            logs = [entry for entry in trainer.state.log_history if "loss" in entry]
            same = all(torch.equal(value, before[key]) for key, value in weights(trainer).items())
            found = {key: [entry[key] for entry in logs] for key in ("loss", "grad_norm")}
            torch.save({**found, "same": same, "spread": logs[0]["frac_reward_zero_std"]}, place / f"{name} {rank}.pt")


def test_equal_rewards_on_two_ranks_teach_nothing(tmp_path):
    run_ranks(equal_rank_main, str(meeting_place(tmp_path)), ranks=2)
    expected = {"loss": [0.0, 0.0], "grad_norm": [0.0, 0.0], "same": True, "spread": 1.0}
    for name in EQUAL:
        for rank in range(2):
            found = torch.load(tmp_path / f"{name} {rank}.pt")
            assert {key: found[key] for key in expected} == expected, name
