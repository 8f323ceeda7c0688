"""Rows in pieces over ranks, with weights in shards, split sequences or split layers: the same losses and weights as on
one rank that runs each row whole."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.sharded_training import A_RANK_WITHOUT, EVALUATED, assert_as_on_one_rank, on_ranks

PIECES = {"tokens_per_microbatch": 16}
"""Some rows fit, and others take several pieces."""
SMALL_STEPS = {"optim": "sgd", "learning_rate": 0.003}
"""For a model that makes much of the last bits of its activations: in float64 pieces differ by 1e-13 there."""
CASES: dict[str, dict[str, Any]] = {
    "SFT": {"kind": "SFT", **EVALUATED},
    "DPO": {"kind": "DPO"},
    "LoRA, DPO": {"kind": "DPO", "lora": True, "gradient_accumulation_steps": 2},
    "LoRA": {"kind": "SFT", "lora": True, "rows": A_RANK_WITHOUT},
    "rehearsed": {"kind": "SFT", "rehearsal": True},
    "KTO": {"kind": "KTO", "rows": A_RANK_WITHOUT},
    **{name: {"kind": name} for name in ("Reward", "BCO", "ORPO")},
    "epochs": {"kind": "SFT", "max_steps": -1, "num_train_epochs": 2, "rows": 4, **EVALUATED},
    "few scores": {"kind": "SFT", "scored": "half"},
    "a loss of the whole batch": {"kind": "DPO", "loss_type": "aot", "rows": A_RANK_WITHOUT},
    "clipped": {"kind": "SFT", "max_grad_norm": 0.01},
    "accumulation": {"kind": "SFT", "gradient_accumulation_steps": 2},
    "checkpointing": {"kind": "SFT", "gradient_checkpointing": True},
    "tied": {"kind": "SFT", "model": "tied"},
    "windows": {"kind": "DPO", "model": "gemma3"},
    "GKD": {"kind": "GKD", **EVALUATED},
    "shared keys": {"kind": "SFT", "model": "shared keys", **SMALL_STEPS},
    "shared keys, DPO": {"kind": "DPO", "model": "shared keys", **SMALL_STEPS},
}
PLACES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "sequences": {"sequence": 2},
    "sequences, fsdp": {"sequence": 2, "fsdp": True},
    "layers": {"tensor": 2},
    "stages": {"stages": 2},
    "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
TWO_STEPS = {"max_steps": 2}
FIRST = ("SFT", "DPO", "LoRA", "KTO")
IN_PLACE = {
    "fsdp": CASES,
    "sequences": CASES,
    "sequences, fsdp": FIRST,
    "layers": ("SFT", "DPO", "LoRA", "windows", "tied", "GKD"),
    "stages": [name for name in CASES if "shared keys" not in name],
    "zero2": ("SFT", "DPO", "few scores"),
    "zero3": ("SFT", "DPO", "LoRA", "few scores", "a loss of the whole batch", "accumulation"),
}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    every = {
        f"{name}, {place}": {**TWO_STEPS, **CASES[name], **PIECES, **PLACES[place]}
        for name, place in cells()
        if "deepspeed" not in PLACES[place] or find_spec("deepspeed") is not None
    }
    on_ranks(folder, every)
    return folder


def cells() -> list[tuple[str, str]]:
    return [(name, place) for place, names in IN_PLACE.items() for name in names]


def marked(name: str, place: str) -> Any:
    return pytest.param(name, place, marks=needs_deepspeed if place.startswith("zero") else ())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), [marked(*each) for each in cells()])
def test_two_ranks_learn_what_one_does(name, place, two_ranks):
    assert_as_on_one_rank(two_ranks, f"{name}, {place}", {**TWO_STEPS, **CASES[name]})


def test_stages_count_the_tokens_of_a_pair_in_pieces_as_one_rank_does(tmp_path):
    """Its prompt counts for each completion, however many pieces run it."""
    on_ranks(tmp_path, {"DPO": {**TWO_STEPS, **CASES["DPO"], **PIECES, **PLACES["stages"]}})
    assert_as_on_one_rank(tmp_path, "DPO", {**TWO_STEPS, **CASES["DPO"]})
