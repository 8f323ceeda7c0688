"""In a file, where no bar can be drawn, each log is a line; on a terminal the bar has the same line beneath it."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from lowtide.trainers.reports import progress as module
from lowtide.trainers.reports.progress import RichProgress

LOGS = {"loss": 1.25, "reward": 0.5, "learning_rate": 2e-5, "tokens_per_second": 1234.5, "memory/peak": 1.5}
TOLD = "loss 1.25, reward 0.5, lr 2e-05, 1,234 tokens/s, peak 1.50 GiB"


def state(*, step: int = 2, first_rank: bool = True) -> SimpleNamespace:
    return SimpleNamespace(is_world_process_zero=first_rank, global_step=step, max_steps=6)


def said_of(logs: dict, capsys, **given) -> str:
    progress = RichProgress()
    progress.begun = 0, progress.begun[1] - 20.0
    progress.on_log(None, state(**given), None, logs=logs)
    return capsys.readouterr().err


def test_a_log_is_a_line_with_what_is_left(capsys):
    assert said_of(LOGS, capsys) == f"step 2/6: {TOLD}, 0:00:40 left\n"
    assert said_of({"eval_loss": 1.25}, capsys, step=6) == "step 6/6: eval loss 1.25\n"


def test_other_ranks_and_logs_without_these_say_nothing(capsys):
    assert said_of(LOGS, capsys, first_rank=False) == ""
    assert said_of({"train_runtime": 3.0}, capsys) == ""


def run_of(progress: RichProgress) -> None:
    progress.on_train_begin(None, state(step=0), None)
    progress.on_step_end(None, state(), None)
    progress.on_log(None, state(), None, logs=LOGS)
    progress.on_train_end(None, state(), None)


def test_a_file_has_no_bar_and_no_carriage_return(capsys):
    run_of(RichProgress())
    assert capsys.readouterr().err.startswith(f"step 2/6: {TOLD}, ")


def test_a_terminal_has_the_line_beneath_the_bar(monkeypatch, capsys):
    screen = io.StringIO()
    monkeypatch.setattr(
        module, "Console", lambda **given: Console(file=screen, force_terminal=True, width=100, color_system=None)
    )
    run_of(RichProgress())
    last = screen.getvalue().rsplit("training", 1)[1]
    assert "2/6" in last
    assert TOLD in last
    assert capsys.readouterr().err == ""
