"""Completions that a server writes while the policy is trained on earlier ones: the same bits each time, and after a
resumption, and an end with a checkpoint where the server fails."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import lowtide
from lowtide.rollout.generators.vllm.http import ServerError
from lowtide.rollout.generators.vllm.turns import WrittenTurn
from lowtide.trainers.checkpoints.signals import Stopped
from tests.support.runs.online_runs import online, prompts, weights
from tests.support.vllm.writing_server import Writes, rollout_threads, writing_server

STEPS = 6
WINDOW = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "steps_per_generation": 2}
"""Two optimizer steps learn from what is written at a time."""
SAVING = {"save_strategy": "steps", "save_steps": 1}


def beside(folder: Path, url: str, **options: Any) -> Any:
    """A run whose next window is written while it learns from one."""
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "max_staleness": 2}
    server |= {"vllm_server_retries": 1, "vllm_server_retry_pause": 0.01}
    server |= {"vllm_weight_check_interval": 0}  # which would write, too
    return online(folder, **{**WINDOW, **server, "max_steps": STEPS, "learning_rate": 2e-3} | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole")


class Whole:
    """A run that was not interrupted, with what was asked of the server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine = folder, Writes()
        with writing_server(self.engine) as server:
            self.trainer = beside(folder, server.url, **SAVING, log_completions=True)
            self.trainer.train()
        self.logs = [each for each in self.trainer.state.log_history if "loss" in each]

    @property
    def weights(self) -> dict[str, Tensor]:
        return weights(self.trainer)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return Whole(folder)


@pytest.fixture
def engine() -> Writes:
    return Writes()


@pytest.fixture
def url(engine: Writes) -> Iterator[str]:
    with writing_server(engine) as server:
        yield server.url


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_each_window_is_written_once_by_the_weights_of_a_window_before(whole: Whole):
    assert [each.get("sample/staleness_mean") for each in whole.logs] == [0, None, 2, None, 2, None]
    assert whole.engine.asked == 3, "none is dropped, and none beyond the end of the run is asked for"
    assert whole.engine.copies == 2, "the first two are by the same weights"
    corrected = [each.get("sampling/sampling_logp_difference/max") for each in whole.logs[::2]]
    assert corrected[0] < 1e-9 < 1e-3 < min(corrected[1:])
    assert all(each["perf/weight_sync_s"] > 0 and each["perf/rollout_wait_s"] >= 0 for each in whole.logs[::2])


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4])
def test_resumed_in_a_window_or_between_two_the_bits_are_the_same(whole: Whole, step, engine, url, tmp_path):
    checkpoint = whole.folder / f"checkpoint-{step}"
    assert sorted(each.name for each in checkpoint.glob("rollout_*")) == (
        ["rollout_0.safetensors", "rollout_0_0_2.safetensors"] if step == 3 else ["rollout_0_0_2.safetensors"]
    )
    trainer = beside(tmp_path, url)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert_same(weights(trainer), whole.weights)
    assert engine.asked == 0, "the last window was written before"
    assert logged(trainer, step) == logged(whole.trainer, step)


def logged(trainer: Any, after: int) -> list[dict[str, float]]:
    """What was logged of the steps after one, but for times and memory."""
    kinds = ("loss", "grad_norm", "reward", "completions/", "sample/", "sampling/")
    logs = [each for each in trainer.state.log_history if "loss" in each and each["step"] > after]
    return [{name: value for name, value in each.items() if name.startswith(kinds)} for each in logs]


@pytest.mark.slow
def test_a_run_repeats_whatever_is_slow_or_fails_and_an_evaluation_changes_nothing(whole, engine, url, tmp_path):
    def before(number: int) -> None:
        time.sleep(0.2 * (number % 2))
        if number in (2, 5):
            raise RuntimeError("for once")

    engine.before = before
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}
    trainer = beside(tmp_path, url, **evaluated, arguments={"eval_dataset": prompts(2)})
    trainer.train()
    assert_same(weights(trainer), whole.weights)
    assert sum("eval_reward" in each for each in trainer.state.log_history) == 2


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, work: Any) -> None:
        self.step, self.work = step, work

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.step:
            self.work()


def no_thread_within(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while rollout_threads() and time.monotonic() < until:
        time.sleep(0.02)
    return not rollout_threads()


@pytest.mark.slow
def test_sigterm_ends_the_thread_and_leaves_a_checkpoint_with_what_was_asked(whole: Whole, url, tmp_path, capfd):
    trainer = beside(tmp_path, url, save_strategy="steps", save_steps=100)
    trainer.add_callback(At(1, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(Stopped, match="143"):
        trainer.train()
    assert no_thread_within(5)
    again = beside(tmp_path, url)
    again.train(resume_from_checkpoint=True)
    assert_same(weights(again), whole.weights)


FAILURES = {
    "dies": (ServerError, "refuses /generate .500.: RuntimeError: of the engine"),
    "hangs": (ServerError, "did not answer /generate within 0.3 seconds: it hangs"),
    "nan": (ValueError, "log-probabilities that are missing or not finite"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILURES)
def test_a_server_that_fails_ends_the_run_with_a_checkpoint(how, engine, url, tmp_path):
    error, text = FAILURES[how]
    trainer = beside(tmp_path, url, save_strategy="steps", save_steps=100)
    released = threading.Event()

    def before(number: int) -> None:
        if number >= 2 and how == "dies":
            raise RuntimeError("of the engine")
        if number >= 2 and how == "hangs":
            released.wait(20)

    def after(number: int, found: list[WrittenTurn]) -> list[WrittenTurn]:
        if how == "hangs":
            trainer.maker.generator.calls.timeout = 0.3
        unknown = how == "nan" and number == 2
        return [replace(each, logprobs=[math.nan] * len(each.logprobs)) if unknown else each for each in found]

    engine.before, engine.after = before, after
    with pytest.raises(error, match=text) as raised:
        trainer.train()
    released.set()
    assert (tmp_path / "checkpoint-2").is_dir()
    assert any("checkpoint-2" in each for each in raised.value.__notes__)
    assert no_thread_within(5)


# -- what is refused ---------------------------------------------------------------------------------------------

SERVED = {"use_vllm": True, "vllm_mode": "server", "max_staleness": 4}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_staleness": 1}, "which a server does: set use_vllm=True and vllm_mode='server'"),
        ({**SERVED, "vllm_mode": "colocate"}, "which a server does"),
        ({**SERVED, "vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=True corrects"),
        ({**SERVED, "max_staleness": 1, "steps_per_generation": 3}, "set max_staleness to 3 or above, or to 0"),
        ({**SERVED, "max_staleness": 3, "num_iterations": 4}, "set max_staleness to 4 or above, or to 0"),
        ({**SERVED, "queue_maxsize": 7}, "queue_maxsize=7 holds no window of 8 completions"),
        ({"weight_sync_steps": 2}, "weight_sync_steps=2 is above 1"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"heartbeat_stale_after_s": 0.0}, "heartbeat_stale_after_s"),
    ],
)
def test_options_that_cannot_work_say_what_would(options, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        lowtide.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({}, 1),
        ({"max_staleness": 0}, 0),
        ({"steps_per_generation": 2}, 1),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1}, 4),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1, "queue_maxsize": 17}, 2),
        ({"gradient_accumulation_steps": 4}, 1),
    ],
)
def test_as_many_windows_are_asked_for_as_one_copy_of_the_weights_writes(options, windows, tmp_path):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", **SERVED, **options}
    assert lowtide.GRPOConfig(**given).windows_ahead == windows


def test_a_rollout_func_is_refused(url, tmp_path):
    with pytest.raises(ValueError, match="max_staleness does not go with rollout_func"):
        beside(tmp_path, url, arguments={"rollout_func": lambda *_: {}})
