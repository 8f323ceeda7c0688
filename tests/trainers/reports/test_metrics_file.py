"""`metrics.jsonl` has each log of a run, also of one that is resumed, and no run ends for want of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lowtide.trainers.reports.metrics_file import METRICS, MetricsFile
from lowtide.trainers.reports.start import StartReport
from tests.support.runs.small_runs import small, trained


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_a_resumed_run_has_the_logs_up_to_its_checkpoint_and_its_own(tmp_path, capsys):
    first = trained(tmp_path, logging_steps=1, max_steps=3)
    assert lines(tmp_path) == first.state.log_history
    assert [each["step"] for each in lines(tmp_path) if "loss" in each] == [1, 2, 3]
    again = small(tmp_path, logging_steps=1, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [each["step"] for each in lines(tmp_path) if "loss" in each] == [1, 2, 3, 4]
    assert lines(tmp_path) == again.state.log_history
    assert all(each["tokens_per_second"] > 0 for each in lines(tmp_path) if "loss" in each)
    (report,) = [each for each in again.callback_handler.callbacks if isinstance(each, StartReport)]
    (said,) = report.summary()
    tokens = sum(again.state.log_history[n]["num_tokens"] * sign for n, sign in ((-2, 1), (1, -1)))
    assert said.startswith("Trained 2 steps in 0:00:0")
    assert f", {tokens:,.0f} tokens, " in said
    assert "; peak memory " in said


def test_numbers_that_json_has_not_are_null_and_a_file_that_cannot_be_written_is_said_once(tmp_path, caplog):
    metrics, args = MetricsFile(), SimpleNamespace(output_dir=str(tmp_path / "run"))
    state = SimpleNamespace(is_world_process_zero=True, log_history=[])
    metrics.on_train_begin(args, state, None)
    state.log_history.append({"loss": float("nan"), "memory/phase": "forward", "step": 1})
    metrics.on_log(args, state, None)
    assert lines(tmp_path / "run") == [{"loss": None, "memory/phase": "forward", "step": 1}]
    (tmp_path / "run" / METRICS).unlink()
    (tmp_path / "run" / METRICS).mkdir()
    for _ in range(2):
        metrics.on_log(args, state, None)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'run' / METRICS} is not written: Is a directory"
    ]


def test_other_ranks_write_nothing(tmp_path):
    metrics, args = MetricsFile(), SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(is_world_process_zero=False, log_history=[{"loss": 1.0}])
    metrics.on_train_begin(args, state, None)
    metrics.on_log(args, state, None)
    assert not [*tmp_path.iterdir()]
