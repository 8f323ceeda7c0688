"""Rows of some tokens that PEFT trains (`trainable_token_indices`), on two ranks that share states or weights: what one
rank learns, in files that PEFT loads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.support.matrix import matrix
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import assert_near, build, meeting_place, rank_of, trained

KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "rows of the vocabulary": {"fsdp": True, "fsdp_split_vocabulary": True},
}
if find_spec("deepspeed") is not None:
    sizes = {"stage3_param_persistence_threshold": 0}
    KINDS |= {f"zero{stage}": {"deepspeed": {"zero_optimization": {"stage": stage, **sizes}}} for stage in (2, 3)}
CASES: dict[str, dict[str, Any]] = {
    "own head": {"kind": "SFT", "model": None},
    "tied head": {"kind": "SFT", "model": "tied"},
    "tied head, DPO": {"kind": "DPO", "model": "tied", "tokens_per_microbatch": 90},
}
TOKENS = {"lora": {"trainable_token_indices": [5, 9, 70]}, "learning_rate": 0.01}


def train(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, how in KINDS.items():
            for case, options in CASES.items():
                where = place / f"{name}, {case}"
                losses, weights, _ = trained(ranks=2, folder=where, save_to=where / "saved", **TOKENS, **options, **how)
                if rank == 0:
                    torch.save((losses, weights), where / "found.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = meeting_place(tmp_path_factory.mktemp("tokens"))
    run_ranks(train, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_learn_what_one_does_and_peft_loads_it(name, case, on_two_ranks, tmp_path):
    where = on_two_ranks / f"{name}, {case}"
    losses, weights = torch.load(where / "found.pt")
    expected_losses, expected, _ = trained(ranks=1, folder=tmp_path, **TOKENS, **CASES[case])
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_near(weights, expected, 2e-5)
    given = CASES[case]["model"]
    base = matrix.build(CASES[case]["kind"], 64) if given is None else build(given)
    loaded = dict(PeftModel.from_pretrained(base, str(where / "saved")).named_parameters())
    rows = {key: value for key, value in weights.items() if "trainable_tokens_delta" in key}
    assert rows
    for key, value in rows.items():
        assert torch.equal(loaded[key], value.to(loaded[key].dtype)), key
