"""Ranks that split sequences (`sp_size`) against one rank: the same losses and weights, in every trainer that learns
from rows, and with its options."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig

from lowtide.engine.forward import sequence_of
from tests.support.matrix import matrix
from tests.support.ranks import sharded_training
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import (
    assert_as_on_one_rank,
    assert_near,
    meeting_place,
    of_equal_bits,
    on_ranks,
    rank_of,
    resumed,
    resumed_on_ranks,
)

CASES: dict[str, dict[str, Any]] = {
    **sharded_training.CASES,
    "shuffled": {"kind": "SFT", "train_sampling_strategy": "random", "max_steps": 5, "rows": 4},
    "balanced": {"kind": "SFT", "train_sampling_strategy": "batch_rebalance", "rows": 4},
    "grouped": {"kind": "SFT", "train_sampling_strategy": "group_by_length", "rows": 4},
    "heads in turn": {"kind": "SFT", "attention_head_chunks": 2},
    "experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.01},
}
OF_SINGLE_BATCHES = ("experts",)
"""Whose loss has a term that is no sum over rows, so that it depends on the rows of a rank."""


# -- two ranks -----------------------------------------------------------------------------------------------------

SHARDED = ("SFT", "DPO", "KTO", "few scores, small micro-batches", "checkpointing", "tied", "epochs")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks, and of some with weights in shards."""
    folder = tmp_path_factory.mktemp("two")
    shards = {f"{name}, fsdp": {**CASES[name], "fsdp": True} for name in SHARDED}
    on_ranks(folder, {name: {**case, "sequence": 2} for name, case in {**CASES, **shards}.items()})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *(f"{name}, fsdp" for name in SHARDED)])
def test_two_ranks_learn_what_one_does(name, two_ranks):
    assert_as_on_one_rank(two_ranks, name, CASES[name.removesuffix(", fsdp")])


def test_two_ranks_learn_and_evaluate_as_one_does(tmp_path):
    on_ranks(tmp_path, {"SFT": {**CASES["SFT"], "sequence": 2}})
    assert_as_on_one_rank(tmp_path, "SFT", CASES["SFT"])


# -- four ranks ----------------------------------------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {"fsdp": True},
    "shards by size": {"parallelism_config": {"dp_shard_size": 2}},
    "four of one sequence": {"sequence": 4},
}
PLACED = ("SFT", "DPO", "KTO", "epochs", "heads in turn")


def cells() -> list[tuple[str, str]]:
    """Every case on whole weights, and some of them otherwise."""
    whole = [(name, "whole") for name in CASES if name not in OF_SINGLE_BATCHES]
    return [*whole, *((name, place) for place in PLACES if place != "whole" for name in PLACED)]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    cases = {f"{name}, {place}": {"sequence": 2, **CASES[name], **PLACES[place]} for name, place in cells()}
    on_ranks(folder, cases, ranks=4)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), cells())
def test_four_ranks_learn_what_one_does(name, place, four_ranks):
    assert_as_on_one_rank(four_ranks, f"{name}, {place}", CASES[name])


@pytest.mark.slow
def test_the_last_batch_of_an_epoch_has_each_row_once(tmp_path):
    case = {"kind": "SFT", "rows": 6, "max_steps": 6}  # of 16 rows, the last four of which are three and one
    on_ranks(tmp_path, {"SFT": {**case, "sequence": 2}}, ranks=4)
    assert_as_on_one_rank(tmp_path, "SFT", case)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumes_to_equal_bits_and_on_one_rank(tmp_path):
    resumed_on_ranks(tmp_path, {"whole": {"sequence": 2}, "shards": {"sequence": 2, "fsdp": True}})
    expected = resumed(tmp_path / "one", 1, None)
    for name in ("whole", "shards"):
        assert_near(of_equal_bits(tmp_path, name), expected, 1e-5)
        assert_near(resumed(tmp_path / f"back {name}", 1, tmp_path / f"first {name}"), expected, 1e-5)


# -- what is refused -----------------------------------------------------------------------------------------------

REFUSALS = {
    "padded": ({"padding_free": False}, "cannot split sequences over ranks, since it runs padded"),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "eager"}, "cannot exchange heads between ranks"),
}


def refuse(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for options, said in REFUSALS.values():
            given = {"kind": "SFT", "parallelism_config": {"sp_size": 2}, **options}
            with pytest.raises(ValueError, match=said):
                matrix.make(**given)
        torch.manual_seed(rank)
        trainer = matrix.make("SFT", parallelism_config={"sp_size": 2}, train_sampling_strategy="sequential")
        plain = trainer.data_collator
        trainer.data_collator = lambda rows: plain(rows if torch.rand(()) < 0 else rows[rank:])
        with pytest.raises(ValueError, match="have different ones"):
            trainer.train()


def test_what_cannot_be_done_on_split_sequences_is_refused(tmp_path):
    run_ranks(refuse, str(meeting_place(tmp_path)))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"sp_size": 3}, "sp_size=3 is 3, and there are 4 processes: make the sizes multiply to it, or start 3"),
        ({"sp_size": 2, "dp_shard_size": 4}, "dp_shard_size=4 times sp_size=2 is 8, and there are 4 processes"),
        ({"sp_size": 2, "dp_replicate_size": 4}, "dp_replicate_size=4 times dp_shard_size=1 times sp_size=2 is 8"),
        ({"sp_size": 2, "cp_size": 2}, "sp_size=2 and cp_size=2 both split sequences: leave one of them out"),
        ("two", "parallelism_config='two' is no ParallelismConfig: give its sizes"),
        ({"sq_size": 2}, "no key 'sq_size'; did you mean 'sp_size'"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_said(sizes, said, read):
    with pytest.raises(ValueError, match=said):
        read(4, parallelism_config=sizes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"parallelism_config": {"sp_size": 4}}, ("ddp", 1, 1)),
        ({"parallelism_config": '{"sp_size": 4}'}, ("ddp", 1, 1)),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, ("ddp", 1, 2)),
        ({"parallelism_config": ParallelismConfig(sp_size=2, dp_replicate_size=2)}, ("ddp", 1, 2)),
        ({"parallelism_config": ParallelismConfig(sp_size=2, dp_shard_size=2)}, ("fsdp2", 4, 2)),
        ({"parallelism_config": ParallelismConfig(sp_size=2), "fsdp": True}, ("fsdp2", 4, 2)),
        ({"parallelism_config": {"sp_size": 2, "dp_replicate_size": 2}, "fsdp": True}, ("fsdp2", 4, 2)),
    ],
    ids=range(7),
)
def test_sizes_are_read(options, expected, read):
    found = read(4, **options)
    assert (found.kind, found.shards, found.data_ranks) == expected
    assert found.runs


def test_context_parallelism_is_mapped_aloud(read, caplog):
    with caplog.at_level(logging.INFO, "lowtide"):
        found = read(2, parallelism_config={"cp_size": 2})
    assert found.sequence_parallel == 2
    assert "cp_size=2: attention heads are exchanged (Ulysses) in place of ring attention" in caplog.text


def test_one_process_has_whole_sequences(read, caplog):
    with caplog.at_level(logging.WARNING, "lowtide"):
        found = read(1, parallelism_config={"sp_size": 2})
    assert found.sequence_parallel == found.devices == 1
    assert "torchrun --nproc_per_node" in caplog.text


def test_what_accelerate_launch_says_is_read(read, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found = read(4)
    assert (found.kind, found.shards, found.sequence_parallel) == ("fsdp2", 4, 2)
    with pytest.raises(ValueError, match="sp_size=4, and accelerate's parallelism_config: sp_size=2: leave one"):
        read(4, parallelism_config={"sp_size": 4})


# -- memory --------------------------------------------------------------------------------------------------------


def look_at_ranks(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = matrix.make("DPO", parallelism_config={"sp_size": 2}, max_steps=1, ddp_timeout=77)
        for model in (trainer.model, trainer.reference.model):
            sequence = sequence_of(model)
            assert sequence is not None
            assert (sequence.size, sequence.rank) == (2, rank)
            assert sequence.group is not None
            assert sequence.group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77
        assert trainer.get_total_train_batch_size(trainer.args) == matrix.BATCH
        assert len(trainer.get_train_dataloader()) == matrix.ROWS // matrix.BATCH
        run = matrix.watched(trainer)
        whole = trainer.step_taker.tokens * 2
        assert max(run.forwards) <= whole // 2 + 1  # of a rank's own tokens


def test_a_rank_computes_its_share_of_the_tokens(tmp_path):
    run_ranks(look_at_ranks, str(meeting_place(tmp_path)))
