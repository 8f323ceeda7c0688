"""Streams that have fewer batches than a step accumulates: the step is made of what there is, as of a dataset's last
rows, and of what has nothing the run says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import IterableDataset

from tests.support.marks import slow_but
from tests.support.matrix import matrix
from tests.support.matrix.matrix_models import rows as rows_of
from tests.support.runs.online_runs import online, prompts

SHORT: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 3}


def over(kind: str, given: Any, **options: Any) -> Any:
    """A trainer over these rows."""
    with mock.patch.object(matrix, "rows", return_value=given), mock.patch.object(matrix.Watched, "prepared", {}):
        return matrix.make(kind, **options)


def steps(kind: str, given: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the weights of a run over these rows."""
    trainer = over(kind, given, **SHORT | options)
    trainer.train()
    assert trainer.state.global_step == SHORT["max_steps"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach() for name, p in trainer.model.named_parameters()}


def test_rows_that_are_all_dropped_with_the_last_batch_are_said_to_be():
    rows = rows_of("SFT")
    trainer = over("SFT", rows, dataloader_drop_last=True, per_device_train_batch_size=len(rows) + 1, max_steps=1)
    with pytest.raises(ValueError, match="dataloader_drop_last=True drops a last batch that is not full"):
        trainer.train()


def nothing_to_train_on() -> Iterator[dict[str, str]]:
    """Rows whose completions are beyond `max_length=4`."""
    yield from [{"prompt": "1+1=", "completion": "x" * 9}] * 3


@pytest.mark.parametrize("count", [1, 3], ids=["one batch", "a batch and a half step"])
@pytest.mark.parametrize("kind", slow_but(["SFT", "DPO"], ["SFT", "DPO", "KTO", "Reward", "GKD"]))
def test_the_steps_are_those_of_a_dataset(kind, count):
    """Each pass ends with a step of what is left; nothing of it is carried into the next pass."""
    rows = rows_of(kind).select(range(count * 4 - 1))
    options = {"per_device_train_batch_size": 8}  # four a batch
    wanted = steps(kind, rows, **options)
    found = steps(kind, rows.to_iterable_dataset(), **options)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert len(set(found[0])) == SHORT["max_steps"]
    for name, weight in wanted[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-5, atol=1e-7, msg=name)


def test_a_packed_stream_of_one_bin_trains():
    options = {"packing": True, "max_length": 512, "shuffle_dataset": False}
    losses, _ = steps("SFT", rows_of("SFT").to_iterable_dataset(), **options)
    assert losses[0] > losses[-1]


def test_prompts_of_one_window_train(tmp_path):
    given = prompts(2).to_iterable_dataset()
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "max_steps": 2, "shuffle_dataset": False}
    trainer = online(tmp_path, **options, arguments={"train_dataset": given})
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_that_has_nothing_to_train_on_ends_the_run(packing):
    rows = IterableDataset.from_generator(nothing_to_train_on)
    options = {"packing": packing, "max_length": 4, "truncation_mode": "keep_start"}
    with pytest.raises(ValueError, match="train_dataset gave no batch"):
        steps("SFT", rows, **options)


def test_fewer_prompts_than_a_window_end_the_run(tmp_path):
    with pytest.raises(ValueError, match="less than 2 rows"):
        online(tmp_path, arguments={"train_dataset": prompts(1).to_iterable_dataset()}).train()


def test_an_evaluation_without_a_batch_has_no_loss():
    """Its loss would be 0, the best there is."""
    trainer = over("SFT", rows_of("SFT"), max_length=4, truncation_mode="keep_start")
    with pytest.raises(ValueError, match="eval_dataset gave no batch"):
        trainer.evaluate(IterableDataset.from_generator(nothing_to_train_on))


def test_a_long_run_over_a_short_stream_does_not_wait_for_its_end():
    """A pass ends with its stream, and not after as many looks for a batch as there are steps."""
    read = []

    def numbered():
        read.append(len(read))
        yield from rows_of("SFT").select(range(2))

    trainer = over("SFT", IterableDataset.from_generator(numbered), max_steps=10**9)
    before, taken = len(read), []
    theirs = trainer.get_batch_samples

    def looked(*given: Any) -> Any:
        found = theirs(*given)
        taken.append(len(found[0]))
        trainer.control.should_training_stop = len(taken) == 4
        return found

    trainer.get_batch_samples = looked
    trainer.train()
    assert taken == [1, 0, 1, 0]
    assert len(read) == before + 2
