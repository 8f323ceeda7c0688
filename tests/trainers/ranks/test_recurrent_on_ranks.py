"""Recurrent layers over ranks: with whole weights on each, with weights in shards and with split sequences, a training
has the losses and weights of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.sharded_training import A_RANK_WITHOUT, EVALUATED, assert_as_on_one_rank, on_ranks

MODELS = ("qwen3_5", "bamba", "jamba")
"""A gated delta rule, Mamba-2 and a selective scan, each beside layers of attention."""
FURTHER = ("kimi_linear", "nemotron_h", "mamba2", "mamba", "zamba", "zamba2")
"""Decays of channels, layers of one half, models without attention, and layers within layers that share weights."""
SMALL_STEPS = {"optim": "sgd", "learning_rate": 0.003, "max_steps": 2}
PLACES: dict[str, dict[str, Any]] = {"copies": {}, "fsdp": {"fsdp": True}, "sequences": {"sequence": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "SFT": {"kind": "SFT", "rows": A_RANK_WITHOUT},
    "DPO": {"kind": "DPO", "gradient_checkpointing": True},
    "pieces": {"kind": "SFT", "tokens_per_microbatch": 16, **EVALUATED},
}
PAIRS = (*(("SFT", place) for place in PLACES), ("DPO", "fsdp"), ("pieces", "sequences"))
CELLS = [
    *((kind, model, place) for kind, place in PAIRS for model in MODELS),
    *(("SFT", model, place) for place in ("copies", "fsdp") for model in FURTHER),
]


def case(kind: str, model: str) -> dict[str, Any]:
    return {"model": model, "router_aux_loss_coef": 0.0, **SMALL_STEPS, **KINDS[kind]}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every cell on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    on_ranks(folder, {", ".join(cell): {**case(*cell[:2]), **PLACES[cell[2]]} for cell in CELLS})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model", "place"), CELLS)
def test_two_ranks_learn_what_one_does(kind: str, model: str, place: str, two_ranks: Path):
    assert_as_on_one_rank(two_ranks, f"{kind}, {model}, {place}", case(kind, model))
