"""Rows of head and embedding that stay on their ranks (`fsdp_split_vocabulary`) against whole weights on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lowtide.engine.forward import causal_model
from lowtide.ops.logits import linear_logprobs
from tests.support.matrix import matrix
from tests.support.ranks import sharded_training
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import (
    A_RANK_WITHOUT,
    assert_near,
    build,
    meeting_place,
    on_ranks,
    rank_of,
    resumed,
    trained,
    written,
)

SPLIT = {"fsdp": True, "fsdp_split_vocabulary": True}
CASES: dict[str, dict[str, Any]] = {
    "SFT": {"kind": "SFT", "evaluated": True, "rehearsal": True},
    "tied": {"kind": "SFT", "model": "tied", "evaluated": True},
    **{name: sharded_training.CASES[name] for name in ("evaluated between steps", "moved between steps")},
    "DPO": {"kind": "DPO", "tokens_per_microbatch": 90},
    "KTO": {"kind": "KTO", "rows": A_RANK_WITHOUT},
    "Reward": {"kind": "Reward"},
    "LoRA": {"kind": "SFT", "lora": True},
    "LoRA, DPO": {"kind": "DPO", "lora": True, "gradient_accumulation_steps": 2},
    "LoRA on the head": {"kind": "SFT", "lora": {"target_modules": ["q_proj", "lm_head"]}},
    "LoRA on the head, DPO": {"kind": "DPO", "lora": {"target_modules": ["q_proj", "lm_head"]}},
    "head trained whole": {"kind": "SFT", "lora": {"modules_to_save": ["lm_head"]}},
    "head and embedding trained whole": {"kind": "SFT", "lora": {"modules_to_save": ["lm_head", "embed_tokens"]}},
    "no scores on a rank": {"kind": "SFT", "scored": "half", "tokens_per_microbatch": 40},
    "a loss of the whole batch": {"kind": "DPO", "loss_type": "aot", "rows": A_RANK_WITHOUT},
    "label smoothing": {"kind": "SFT", "label_smoothing_factor": 0.1},
    "clipped": {"kind": "SFT", "max_grad_norm": 0.01},
    "offloading": {"kind": "DPO", "gradient_checkpointing": True, "activation_offloading": True},
    "padded": {"kind": "DPO", "padding_free": False},
    "scaled embedding": {"kind": "DPO", "model": "gemma3"},
    "soft-capped": {"kind": "SFT", "model": "gemma2"},
    "weights kept from forward to backward": {"kind": "SFT", "fsdp_config": {"reshard_after_forward": False}},
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks."""
    folder = tmp_path_factory.mktemp("split")
    on_ranks(folder, {name: {**case, **SPLIT} for name, case in CASES.items()})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_does(name: str, sharded: Path, tmp_path: Path) -> None:
    losses, weights, evaluation = torch.load(sharded / f"{name}.pt")
    case = {key: value for key, value in CASES[name].items() if key != "fsdp_config"}
    expected_losses, expected_weights, expected_evaluation = trained(ranks=1, folder=tmp_path, **case)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
    assert_near(weights, expected_weights, 2e-5)


@pytest.mark.slow
def test_four_ranks_learn_what_one_does(tmp_path: Path) -> None:
    names = ("SFT", "tied", "LoRA on the head, DPO")
    on_ranks(tmp_path, {name: {**CASES[name], **SPLIT} for name in names}, ranks=4)
    for name in names:
        _, weights, _ = torch.load(tmp_path / f"{name}.pt")
        assert_near(weights, trained(ranks=1, folder=tmp_path / "one", **CASES[name])[1], 2e-5)


ONLINE = ("GRPO", "GRPO, layer by layer", "PPO")


def write_on_ranks(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name in ONLINE:
            found = written(place / f"run-{name}", name, 4, **SPLIT)
            if rank == 0:
                torch.save(found, place / f"{name}.pt")


@pytest.mark.slow
def test_completions_are_written_and_learned_from_as_by_one_rank(tmp_path: Path) -> None:
    run_ranks(write_on_ranks, str(meeting_place(tmp_path)))
    for name in ONLINE:
        assert_near(torch.load(tmp_path / f"{name}.pt"), written(tmp_path / "one", name, 8), 2e-5)


def resume_on_ranks(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for run, start, options in (
            ("first", None, SPLIT),
            ("again", "first", SPLIT),
            ("gathered", "first", {"fsdp": True}),
        ):
            found = resumed(place / run, 2, None if start is None else place / start, model="tied", **options)
            if rank == 0:
                torch.save(found, place / f"{run}.pt")


@pytest.mark.slow
def test_a_run_resumes_to_equal_bits_and_with_whole_heads(tmp_path: Path) -> None:
    expected = resumed(tmp_path / "one", 1, None, model="tied")
    run_ranks(resume_on_ranks, str(meeting_place(tmp_path)))
    first, again, gathered = (torch.load(tmp_path / f"{run}.pt") for run in ("first", "again", "gathered"))
    assert all(torch.equal(again[key], value) for key, value in first.items())
    assert_near(first, expected, 2e-5)
    assert_near(gathered, expected, 2e-5)
    assert_near(resumed(tmp_path / "back", 1, tmp_path / "first", model="tied"), expected, 2e-5)


# -- memory --------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Takes down the most bytes of any tensor on this rank."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_iter((args, kwargs, out)):
            if isinstance(each, Tensor) and not isinstance(each, DTensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return out


def watch_sizes(rank: int, folder: str) -> None:
    vocab, width = 4096, 32
    with rank_of(Path(folder), rank, 2), mock.patch.dict(linear_logprobs.CHUNK_BYTES, cpu=1):
        for model, kind in (("tied", "SFT"), ("gemma2", "DPO")):
            largest = {}
            for split in (True, False):
                options = {**SPLIT, "fsdp_split_vocabulary": split, "max_steps": 2, "per_device_train_batch_size": 2}
                trainer = matrix.make(kind, model=build(model, vocab), **options)
                with LargestTensor() as watch:
                    trainer.train()
                largest[split] = watch.bytes
                if split:
                    with pytest.raises(ValueError, match="all logits were asked"), torch.no_grad():
                        trainer.model(input_ids=torch.tensor([[1, 2, 3]]))
                weight: Any = causal_model(trainer.model).get_output_embeddings().weight
                assert weight.to_local().shape == (vocab // 2, width)
            whole = vocab * width * 4
            assert largest[True] == whole // 2
            assert largest[False] >= whole


@pytest.mark.slow
def test_no_rank_ever_has_a_whole_head_or_its_gradient(tmp_path: Path) -> None:
    run_ranks(watch_sizes, str(meeting_place(tmp_path)))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "requires fsdp=True"),
        ({"fsdp": "hybrid_shard"}, "copies of shards"),
        ({"fsdp": "full_shard offload"}, "host's memory"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=said):
        matrix.classes("SFT")[1](str(tmp_path), use_cpu=True, report_to="none", fsdp_split_vocabulary=True, **options)
