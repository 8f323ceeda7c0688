"""Prompts that come as streams: written after, rewarded and evaluated as those of a dataset."""

from __future__ import annotations

import pytest

from tests.support.marks import slow_but
from tests.support.runs.online_runs import online, prompts

SIX = {"per_device_train_batch_size": 6, "per_device_eval_batch_size": 6, "num_generations": 3}


def numbers(found):
    times = ("runtime", "per_second", "memory", "time")
    return {name: value for name, value in found.items() if not any(each in name for each in times)}


@pytest.mark.parametrize("method", slow_but(["GRPO"], ["GRPO", "RLOO"]))
def test_an_evaluation_of_a_stream_is_that_of_its_rows(method, tmp_path):
    """Groups are whole although the rows are no multiple of a group, and no batch is torn."""
    rows = prompts(5).select(range(2))
    trainer = online(tmp_path, method, **SIX, arguments={"eval_dataset": rows})
    expected = numbers(trainer.evaluate(rows))
    assert expected["eval_reward"] > 0
    assert numbers(trainer.evaluate(rows.to_iterable_dataset())) == expected


@pytest.mark.parametrize("method", slow_but(["GRPO"], ["GRPO", "RLOO"]))
def test_streams_by_name_are_evaluated_each(method, tmp_path):
    held = prompts(7)
    by_name = {"short": held.select(range(2)), "long": held.select(range(2, 7))}
    streams = {name: each.to_iterable_dataset() for name, each in by_name.items()}
    found = [
        numbers(online(tmp_path, method, **SIX, arguments={"eval_dataset": each}).evaluate())
        for each in (by_name, streams)
    ]
    assert found[0] == found[1]
    assert {"eval_short_reward", "eval_long_reward"} <= found[0].keys()


def test_streams_are_read_without_workers(tmp_path, caplog):
    """Each worker would read other rows, and tear groups apart."""
    rows = prompts(12)
    whole = online(
        tmp_path, **SIX, dataloader_num_workers=2, arguments={"eval_dataset": prompts(4).to_iterable_dataset()}
    )
    assert whole.get_train_dataloader().num_workers == 2
    assert whole.get_eval_dataloader().num_workers == 0
    assert whole.args.dataloader_num_workers == 2
    streamed = online(
        tmp_path, **SIX, dataloader_num_workers=2, arguments={"train_dataset": rows.to_iterable_dataset()}
    )
    assert streamed.args.dataloader_num_workers == streamed.get_train_dataloader().num_workers == 0
    assert "dataloader_num_workers=2 is set to 0: each worker of a stream would read other rows" in caplog.text
