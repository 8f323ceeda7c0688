"""Ctrl-C once, and SIGTERM, leave a checkpoint from which the run goes on bit by bit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from lowtide.cli.main import main
from lowtide.cli.training.train import RunOptions
from lowtide.trainers.checkpoints import signals
from lowtide.trainers.checkpoints.lock import LOCK, only_run_in
from lowtide.trainers.checkpoints.signals import TERMINATED, StopRequest, stopping_at_once
from lowtide.trainers.checkpoints.stopping import Interrupted, Stopped
from lowtide.trainers.method import MethodTrainer
from lowtide.trainers.reports.metrics_file import METRICS
from lowtide.trainers.reports.run_page import PAGE
from tests.support.marks import slow_but
from tests.support.matrix.matrix import make
from tests.support.runs.small_runs import SAVING, assert_same, small, trained, weights
from tests.support.signals import in_the_foreground


class At(TrainerCallback):
    """Does something at an event of a step."""

    def __init__(self, event: str, step: int, action: Any):
        self.step, self.action = step, action
        setattr(self, event, self.at)

    def at(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            self.action()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)  # the signal is received in a thread


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "step", "saved"),
    slow_but(
        [("on_step_begin", 2, 3), ("on_save", 2, 2)],
        [
            ("on_step_begin", 2, 3),
            ("on_step_end", 3, 3),
            ("on_save", 2, 2),
            ("on_train_begin", 0, 1),
            ("on_step_end", 5, 5),
        ],
    ),
)
def test_sigterm_finishes_the_step_and_writes_a_checkpoint(event, step, saved, tmp_path, capfd):
    whole = weights(trained(tmp_path / "whole"))
    stopped = small(tmp_path / "run")
    stopped.add_callback(At(event, step, terminate))
    with pytest.raises(Stopped) as raised:
        stopped.train()
    assert raised.value.code == TERMINATED == 143
    folder = tmp_path / "run" / f"checkpoint-{saved}"
    assert (
        f"stopped by SIGTERM after step {saved}. The last checkpoint is {folder}; this resumes: "
        in capfd.readouterr().err
    )
    again = small(tmp_path / "run")
    again.train(resume_from_checkpoint=True)
    assert again.resumption.folder == str(folder)
    assert_same(weights(again), whole)


def test_an_evaluation_is_left(tmp_path):
    trainer = small(tmp_path, eval_strategy="no", per_device_eval_batch_size=1)
    trainer.eval_dataset = trainer.train_dataset
    trainer.add_callback(At("on_step_end", 1, lambda: setattr(trainer.control, "should_evaluate", True)))
    seen: list[int] = []
    trainer.add_callback(At("on_prediction_step", 1, lambda: (seen.append(1), terminate())))
    with pytest.raises(Stopped, match="143"):
        trainer.train()
    assert (tmp_path / "checkpoint-1").exists()
    assert trainer.state.log_history[-1].get("eval_loss") is None


def failing(calls: int) -> Any:
    """A `compute_metrics` that fails when it was called so many times."""
    called: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        called.append(1)
        if len(called) == calls:
            raise ZeroDivisionError("of mine")
        return {"mine": 1.0}

    return metrics


@pytest.mark.slow
def test_an_evaluation_that_fails_loses_no_step(tmp_path):
    rows = small(tmp_path / "rows").train_dataset
    whole = weights(trained(tmp_path / "whole"))
    given = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 4}
    trainer = small(tmp_path / "run", **given)
    trainer.eval_dataset, trainer.compute_metrics = rows, failing(3)
    with pytest.raises(ZeroDivisionError, match="of mine") as raised:
        trainer.train()
    whose, way_back = raised.value.__notes__
    assert whose.startswith("This was raised by compute_metrics, a function that was passed (failing.<locals>.metrics)")
    assert way_back.startswith(f"The last checkpoint is {tmp_path / 'run' / 'checkpoint-3'}; this resumes: ")
    again = small(tmp_path / "run", **given)
    again.eval_dataset, again.compute_metrics = rows, failing(99)
    again.train(resume_from_checkpoint=True)
    assert again.resumption.folder == str(tmp_path / "run" / "checkpoint-3")
    assert_same(weights(again), whole)


def test_a_callback_that_fails_leaves_the_last_checkpoint(tmp_path):
    def fail() -> None:
        raise ZeroDivisionError("of mine")

    trainer = small(tmp_path, save_steps=2, save_total_limit=1, logging_steps=1)
    trainer.add_callback(At("on_log", 3, fail))
    with pytest.raises(ZeroDivisionError, match="of mine"):
        trainer.train()
    assert sorted(each.name for each in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]


def test_an_evaluation_that_fails_writes_no_weights_where_none_are_saved(tmp_path):
    trainer = small(tmp_path, save_strategy="no", eval_strategy="steps", eval_steps=1)
    trainer.eval_dataset, trainer.compute_metrics = trainer.train_dataset, failing(1)
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.train()
    assert len(raised.value.__notes__) == 1
    assert {path.name for path in tmp_path.iterdir()} == {METRICS, PAGE}


def test_a_checkpoint_that_could_not_be_written_is_not_tried_twice(tmp_path, monkeypatch):
    trainer, tried = small(tmp_path, save_steps=1), []

    def full(folder: str) -> None:
        tried.append(folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save_rng_state", full)
    with pytest.raises((OSError, ValueError), match="the disk is full"):
        trainer.train()
    assert len(tried) == 1


def test_without_saving_no_weights_are_written(tmp_path, capfd):
    trainer = small(tmp_path, save_strategy="no")
    trainer.add_callback(At("on_step_begin", 2, terminate))
    with pytest.raises(Stopped):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir()} == {METRICS, PAGE}
    assert "There is no checkpoint to resume from: save_strategy is 'no'" in capfd.readouterr().err


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)  # the signal is received in a thread


@pytest.mark.slow
def test_ctrl_c_once_finishes_the_step_and_saves(tmp_path, capfd):
    whole = weights(trained(tmp_path / "whole"))
    trainer, before = small(tmp_path / "run"), signal.getsignal(signal.SIGINT)
    trainer.add_callback(At("on_step_begin", 2, press))
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.train()
    folder = tmp_path / "run" / "checkpoint-3"
    assert isinstance(raised.value, Interrupted)
    assert str(raised.value).startswith(f"interrupted after step 3. The last checkpoint is {folder}; this resumes: ")
    assert "lowtide: Ctrl-C: this step is finished, and then a checkpoint is written; Ctrl-C again quits at once. " in (
        capfd.readouterr().err
    )
    assert signal.getsignal(signal.SIGINT) is before
    again = small(tmp_path / "run")
    again.train(resume_from_checkpoint=True)
    assert_same(weights(again), whole)


def test_ctrl_c_twice_quits_and_names_the_checkpoint_before(tmp_path):
    trainer = small(tmp_path)
    trainer.add_callback(At("on_step_begin", 3, lambda: (press(), press())))
    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted in step 4\. The last checkpoint is .*checkpoint-2; this res"
    ) as raised:
        trainer.train()
    assert isinstance(raised.value, Interrupted)
    assert f"trainer.train(resume_from_checkpoint='{tmp_path / 'checkpoint-2'}')" in str(raised.value)


def test_what_a_launcher_passes_on_is_the_same_ctrl_c():
    told: list[int] = []
    request = StopRequest(30, lambda: told.append(1), interrupts=True, together=30.0)
    with request.received():
        press()
        press()
    assert (request.pressed, told, request.terminated) == (1, [1], False)


def interrupted_without_end() -> None:
    signals.PATIENCE = 0.1
    with in_the_foreground(), StopRequest(30, lambda: None, interrupts=True).received():
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):  # as what waits in C code does
                press()
        time.sleep(100)


def test_what_ctrl_c_twice_does_not_reach_is_ended():
    process = multiprocessing.get_context("fork").Process(target=interrupted_without_end)
    process.start()
    process.join(60)
    assert process.exitcode == 130


def test_a_checkpoint_that_ctrl_c_cut_off_leaves_no_part_of_it(tmp_path, monkeypatch):
    trainer = small(tmp_path)
    write = trainer._save_rng_state
    monkeypatch.setattr(trainer, "_save_rng_state", lambda folder: (write(folder), press(), press()))
    with pytest.raises(KeyboardInterrupt, match="There is no checkpoint to resume from"):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir()} == {METRICS, PAGE}


def test_handlers_of_others_are_called_and_are_back_afterwards(tmp_path):
    called: list[int] = []
    ours = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        theirs = signal.getsignal(signal.SIGTERM)
        trainer = small(tmp_path)
        trainer.add_callback(At("on_step_begin", 2, terminate))
        with pytest.raises(Stopped):
            trainer.train()
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, ours)
    assert signal.set_wakeup_fd(-1) == -1


def test_signals_are_left_alone_without_a_grace_and_beside_the_main_thread():
    handler = signal.getsignal(signal.SIGTERM)
    found = []

    def look(grace: float) -> None:
        with StopRequest(grace, print, print).received():
            found.append(signal.getsignal(signal.SIGTERM))

    look(0)
    thread = threading.Thread(target=look, args=(1,))
    thread.start()
    thread.join()
    assert found == [handler, handler]


def test_without_memory_for_a_thread_a_run_goes_on_and_signals_are_left_alone(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    files, done = len(os.listdir("/proc/self/fd")), []
    monkeypatch.setattr(threading.Thread, "start", start)
    with StopRequest(30, print, print, interrupts=True).received():
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        done.append(True)
    assert (done, len(os.listdir("/proc/self/fd"))) == ([True], files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_are_ignored_stay_so_and_tests_have_them_all_the_same(number, tmp_path):
    """As in a job that a shell runs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        trainer = small(tmp_path / "ignored", max_steps=1, save_strategy="no")
        trainer.add_callback(At("on_step_begin", 0, lambda: signal.raise_signal(number)))
        assert trainer.train().global_step == 1
        with in_the_foreground():
            trainer = small(tmp_path / "foreground", max_steps=1, save_strategy="no")
            trainer.add_callback(At("on_step_begin", 0, lambda: (signal.raise_signal(number), time.sleep(0.05))))
            with pytest.raises((Interrupted, Stopped)):
                trainer.train()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def terminated(call: Any) -> Any:
    """What a call does that is told to stop meanwhile."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        terminate()
        return call(*args, **kwargs)

    return inner


@pytest.mark.parametrize("doing", ["making the trainer", "evaluating", "predicting", "saving the model"])
def test_sigterm_outside_of_training_ends_at_once_in_one_line(doing, tmp_path, monkeypatch, capfd):
    method = {
        "making the trainer": "_plan",
        "evaluating": "evaluation_loop",
        "predicting": "evaluation_loop",
        "saving the model": "_save",
    }[doing]
    trainer: Any = None if doing == "making the trainer" else small(tmp_path)
    monkeypatch.setattr(MethodTrainer, method, terminated(getattr(MethodTrainer, method)))
    rows = [{"prompt": "a", "completion": "b"}]
    calls = {
        "making the trainer": lambda: small(tmp_path),
        "evaluating": lambda: trainer.evaluate(Dataset.from_list(rows)),
        "predicting": lambda: trainer.predict(Dataset.from_list(rows)),
        "saving the model": lambda: trainer.save_model(str(tmp_path / "saved")),
    }
    capfd.readouterr()
    with pytest.raises(Stopped) as raised:
        calls[doing]()
    assert raised.value.code == 143
    assert f"lowtide: stopped by SIGTERM while {doing}; nothing more is written\n" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_command_that_sigterm_ends_while_it_loads_leaves_no_lock(tmp_path, monkeypatch, capfd):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "config.json").write_text("{}")
    output, seen, own = tmp_path / "run", [], RunOptions.load

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dataset_streaming:  # the look at the first row, before there is a lock
            return own(self, *args, **kwargs)
        seen.append((output / LOCK).exists())
        terminate()
        raise AssertionError("it went on")

    monkeypatch.setattr(RunOptions, "load", load)
    words = f"sft --model {tmp_path} --dataset {rows} --output_dir {output} --use_cpu --report_to none"
    assert main(words.split()) == 143
    assert seen == [True]
    assert not (output / LOCK).exists()
    said = capfd.readouterr().err
    assert said.count("stopped by SIGTERM") == 1
    assert "lowtide: stopped by SIGTERM while running lowtide sft; nothing more is written\n" in said


def test_handlers_of_others_that_are_set_meanwhile_have_the_signal_alone(monkeypatch, capfd):
    monkeypatch.setattr(signals, "PATIENCE", 0.05)
    called: list[int] = []
    with stopping_at_once("loading"):
        signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        terminate()
        time.sleep(0.1)
    assert called == [signal.SIGTERM]
    assert capfd.readouterr().err == ""


def load_without_end(folder: Path) -> None:
    signals.PATIENCE = 0.2
    with only_run_in(folder), stopping_at_once("loading"):
        try:
            terminate()
        except SystemExit:  # as a collective does that waits for another rank
            time.sleep(100)


def test_what_cannot_end_by_itself_is_ended_and_leaves_no_lock(tmp_path, capfd):
    process = multiprocessing.get_context("fork").Process(target=load_without_end, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 143
    assert capfd.readouterr().err == "lowtide: stopped by SIGTERM while loading; nothing more is written\n"
    assert list(tmp_path.iterdir()) == []


def stop_slowly(folder: Path) -> None:
    trainer = small(folder, stop_grace=0.5)
    trainer.add_callback(At("on_step_begin", 2, lambda: (terminate(), time.sleep(100))))
    trainer.train()


@pytest.mark.slow
def test_a_step_that_takes_longer_ends_at_once_and_names_the_checkpoint_before(tmp_path, capfd):
    process = multiprocessing.get_context("fork").Process(target=stop_slowly, args=(tmp_path,))
    process.start()
    process.join(90)
    assert process.exitcode == 143
    assert not (tmp_path / LOCK).exists()
    said = capfd.readouterr().err
    assert "no checkpoint could be written in 0.5 s (stop_grace)" in said
    assert f"The last checkpoint is {tmp_path}/checkpoint-2" in said.splitlines()[-1]
    again = small(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5


def test_a_run_with_a_worker_ends(tmp_path):
    """The worker, which is forked from it, holds the pipe that signals come through."""
    trainer = make("SFT", output_dir=str(tmp_path), **SAVING, dataloader_num_workers=1)
    trainer.add_callback(At("on_step_begin", 2, terminate))
    with pytest.raises(Stopped):
        trainer.train()
    assert (tmp_path / "checkpoint-3").exists()
