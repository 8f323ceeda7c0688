"""Distillation on two ranks (whole copies, FSDP2, ZeRO-3, split sequences, split layers) trains, and writes, what one
rank does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of, trained

pytestmark = pytest.mark.slow
ZERO: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
BY_GRADIENTS = {"optim": "sgd", "learning_rate": 0.5}
"""AdamW makes steps of gradients that are rounding alone, and a rank with parts of rows or layers rounds otherwise."""
CASES: dict[str, dict[str, Any]] = {
    "copies": {},
    "shards": {"fsdp": True},
    "shards, small micro-batches": {"fsdp": True, "tokens_per_microbatch": 60},
    "shards, LoRA": {"fsdp": True, "lora": True},
    "shards, rows of the vocabulary": {"fsdp": True, "fsdp_split_vocabulary": True, "tokens_per_microbatch": 60},
    "shards, rows of the vocabulary, LoRA": {
        **{"fsdp": True, "fsdp_split_vocabulary": True, "beta": 0.0},
        "lora": {"target_modules": ["q_proj", "lm_head"]},
    },
    "copies, written": {"lmbda": 0.6, "seq_kd": True, "max_new_tokens": 6},
    "shards, written": {"fsdp": True, "lmbda": 0.6, "seq_kd": True, "max_new_tokens": 6},
    "shards, rows of the vocabulary, written": {
        **{"fsdp": True, "fsdp_split_vocabulary": True},
        **{"lmbda": 0.6, "seq_kd": True, "max_new_tokens": 6},
    },
    "split sequences": {"sequence": 2},
    "split sequences, LoRA": {"sequence": 2, "lora": True, "beta": 1.0},
    "split sequences, in pieces": {"sequence": 2, "tokens_per_microbatch": 20},
    "split sequences, in pieces, shards": {"sequence": 2, "fsdp": True, "tokens_per_microbatch": 20, "beta": 0.0},
    "split sequences, written": {"sequence": 2, "lmbda": 0.6, "seq_kd": True, "max_new_tokens": 6, **BY_GRADIENTS},
    "split layers": {"tensor": 2},
    "split layers, LoRA": {"tensor": 2, "lora": True, "beta": 0.0, "tokens_per_microbatch": 60},
    "split layers, written": {
        **{"tensor": 2, "lmbda": 0.6, "seq_kd": True, "max_new_tokens": 6},
        **BY_GRADIENTS,
    },
    "stages": {"stages": 2, "tokens_per_microbatch": 60},
    "stages, LoRA": {"stages": 2, "lora": True, "beta": 1.0},
    "stages, written": {"stages": 2, "lmbda": 0.6, "seq_kd": True, "max_new_tokens": 6, **BY_GRADIENTS},
    "ZeRO-3": {"deepspeed": ZERO},
    "ZeRO-3, written": {"deepspeed": ZERO, "lmbda": 0.6, "seq_kd": True, "max_new_tokens": 6},
}
SPREAD = ("fsdp", "fsdp_split_vocabulary", "deepspeed", "sequence", "tensor", "stages")
INSTALLED = [name for name, options in CASES.items() if "deepspeed" not in options or find_spec("deepspeed")]


def rank_main(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for number, name in enumerate(INSTALLED):
            found = trained("GKD", 2, place / str(number), **CASES[name])
            if rank == 0:
                torch.save(found, place / f"{number}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, str(meeting_place(folder)))
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in range(len(INSTALLED))]


@pytest.mark.parametrize("name", INSTALLED)
def test_two_ranks_train_what_one_does(name, on_two_ranks, tmp_path):
    losses, weights, _ = on_two_ranks[INSTALLED.index(name)]
    alone = {option: value for option, value in CASES[name].items() if option not in SPREAD}
    expected_losses, expected, _ = trained("GKD", 1, tmp_path, **alone)
    assert losses == pytest.approx(expected_losses, rel=2e-5)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=2e-6, msg=key)
