"""A reward model whose weights lie on two ranks, of which each has completions of its own, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from lowtide.engine.weights.sharded.fully_shard import shard_model
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import is_sharded
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.models import RewardModelOptions
from lowtide.rollout.rewards.rewards import Rewards
from tests.support.models.classifiers import classifier
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.texts.byte_tokenizer import byte_tokenizer

COUNTS = ((5, 1), (3, 0), (0, 2))
"""Completions of either rank, in turn."""
OPTIONS = {"ragged": {}, "padded": {"padding_free": False}}


def completed(count: int) -> Completed:
    tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    prompts, answers = ["Why?"] * count, ["Because " + "of it " * number for number in range(count)]
    ids = {
        name: tokenizer(texts)["input_ids"] if texts else []
        for name, texts in (("prompt_ids", prompts), ("completion_ids", answers))
    }
    return Completed(prompts, answers, **ids)


def rewards(name: str) -> Rewards:
    options = RewardModelOptions(tokens_per_microbatch=40, **OPTIONS[name])
    return Rewards(classifier(pad_token_id=0), processing_classes=byte_tokenizer(), models=options)


def rank_main(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        dist.init_process_group("gloo")
        for name in OPTIONS:
            made = rewards(name)
            made.cut(lambda model: shard_model(model, Sharding(kind="fsdp2", devices=2), torch.device("cpu")))
            assert is_sharded(made.sources[0].model)  # type: ignore[union-attr]
            found = [made(completed(counts[rank])) for counts in COUNTS]
            torch.save(found, Path(folder, f"{name}-{rank}.pt"))


@pytest.mark.slow
def test_rewards_are_those_of_the_whole_model(tmp_path: Path):
    run_ranks(rank_main, str(meeting_place(tmp_path)))
    for name in OPTIONS:
        whole = rewards(name)
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}-{rank}.pt")
            for counts, each in zip(COUNTS, found, strict=True):
                torch.testing.assert_close(each, whole(completed(counts[rank])))


def test_a_model_that_the_engine_does_not_know_stays_whole():
    made = Rewards(classifier("bert", pad_token_id=0), processing_classes=byte_tokenizer())
    made.cut(lambda model: pytest.fail("it was cut"))
    assert made(completed(2)).isfinite().all()
