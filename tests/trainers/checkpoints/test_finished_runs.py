"""A run that has come to its end trains nothing more, however often it is resumed."""

from __future__ import annotations

import pytest

from tests.support.runs.small_runs import assert_same, small, trained, weights


@pytest.mark.parametrize(
    "options",
    [{"max_steps": 4}, {"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1.5}],
    ids=["its end", "an earlier end", "its epochs"],
)
def test_a_finished_run_trains_nothing_more(options, tmp_path, caplog):
    steps = {"num_train_epochs": 2.0, "max_steps": -1} if "num_train_epochs" in options else {"max_steps": 4}
    finished = weights(trained(tmp_path, **steps))  # the learning rate is constant: a step more would change them
    for _ in range(2):
        again = small(tmp_path, **options)
        result = again.train(resume_from_checkpoint=True)
        assert result.global_step == again.state.global_step == 4
        assert again.run.losses == []
        assert_same(weights(again), finished)
        assert "nothing is left to train" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {
        *("checkpoint-2", "checkpoint-4", "metrics.jsonl", "report.html")
    }


def test_a_stream_that_is_finished_is_not_read(tmp_path):
    options = {"max_steps": 4, "train_sampling_strategy": "sequential"}
    finished = weights(trained(tmp_path, **options))
    again = small(tmp_path, **options)
    again.train_dataset = again.train_dataset.to_iterable_dataset().map(_unread)
    again.train(resume_from_checkpoint=True)
    assert_same(weights(again), finished)


def _unread(row: dict) -> dict:
    raise AssertionError("a row was read")
