"""Ranks that each have some layers (`pipeline_parallel_size`) against one rank: the same losses and weights, in every
trainer that learns from rows, and with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sharded_training import assert_near, on_ranks, trained

EVALUATED = {"evaluated": True, "per_device_eval_batch_size": 2, "include_num_input_tokens_seen": "all"}
CASES: dict[str, dict[str, Any]] = {
    "SFT": {"kind": "SFT", "rehearsal": True, "max_steps": 10, **EVALUATED},
    "DPO": {"kind": "DPO", "tokens_per_microbatch": 90, "max_steps": 10, **EVALUATED},
    **{name: {"kind": name} for name in ("KTO", "Reward", "ORPO", "CPO", "BCO")},
    "packed": {"kind": "SFT", "packing": True, "max_length": 52, "rows": 2, "max_steps": 2},
    "epochs": {"kind": "SFT", "max_steps": -1, "num_train_epochs": 2, "rows": 4, **EVALUATED},
    "LoRA": {"kind": "SFT", "lora": True},
    "LoRA, DPO": {"kind": "DPO", "lora": True, "gradient_accumulation_steps": 2, "max_steps": 10},
    "LoRA, Reward": {"kind": "Reward", "lora": True},
    "few scores": {"kind": "SFT", "unscored": True},
    "few scores, small micro-batches": {"kind": "SFT", "unscored": True, "tokens_per_microbatch": 40},
    "a loss of the whole batch": {"kind": "DPO", "loss_type": "aot"},
    "reference computed before": {"kind": "DPO", "precompute_ref_log_probs": True},
    "clipped": {"kind": "SFT", "max_grad_norm": 0.01},
    "one row a micro-batch": {"kind": "SFT", "gradient_accumulation_steps": 2, "tokens_per_microbatch": 50},
    "checkpointing": {"kind": "SFT", "gradient_checkpointing": True, "mlp_tile_tokens": 16},
    "offloading": {"kind": "DPO", "gradient_checkpointing": True, "activation_offloading": True},
    "8-bit states": {"kind": "SFT", "optim": "adamw_8bit"},
    "tied": {"kind": "SFT", "model": "tied"},
    "windows": {"kind": "DPO", "model": "gemma3"},
    "experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.0},
}


def assert_as_on_one_rank(folder: Path, found: str, name: str, **more: Any) -> None:
    """What ranks left in a file is what one rank comes to in a case."""
    losses, weights, seen = torch.load(folder / f"{found}.pt")
    expected_losses, expected_weights, expected_seen = trained(ranks=1, folder=folder / "one", **CASES[name], **more)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    assert seen == pytest.approx(expected_seen, rel=1e-5)
    assert_near(weights, expected_weights, 2e-5)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    on_ranks(folder, {name: {**case, "stages": 2} for name, case in CASES.items()})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_stages_learn_what_one_rank_does(name, two_ranks):
    assert_as_on_one_rank(two_ranks, name, name)


def test_two_stages_learn_and_evaluate_as_one_rank_does(tmp_path):
    on_ranks(tmp_path, {"SFT": {**CASES["SFT"], "stages": 2}})
    assert_as_on_one_rank(tmp_path, "SFT", "SFT")
