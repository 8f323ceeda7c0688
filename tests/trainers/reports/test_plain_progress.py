"""In a file, where no bar can be drawn, each log is a line."""

from types import SimpleNamespace

from lowtide.trainers.reports.progress import RichProgress


def said_of(logs: dict, capsys, *, first_rank: bool = True) -> str:
    progress = RichProgress()
    progress.begun = 0, progress.begun[1] - 20.0
    state = SimpleNamespace(is_world_process_zero=first_rank, global_step=2, max_steps=6)
    progress.on_log(None, state, None, logs=logs)
    return capsys.readouterr().err


def test_a_log_is_a_line_with_what_is_left(capsys):
    said = said_of({"loss": 1.25, "reward": 0.5, "learning_rate": 2e-5, "epoch": 0.1}, capsys)
    assert said == "step 2/6: loss 1.25, reward 0.5, learning rate 2e-05, 0:00:40 left\n"


def test_other_ranks_and_logs_without_these_say_nothing(capsys):
    assert said_of({"loss": 1.25}, capsys, first_rank=False) == ""
    assert said_of({"train_runtime": 3.0}, capsys) == ""
