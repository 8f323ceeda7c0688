"""Windows that are asked for before their turn: the order of things, and what comes of those that fail."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rollout import Rollout
from lowtide.run.ahead import THREAD, Ahead, BesideTraining, Hangs
from lowtide.run.rollouts import Made


def made(version: int = 0, logprobs: tuple[float, ...] = (-1.0, -2.0)) -> Made:
    completion = Completion([5, 6], list(logprobs), [math.nan] * 2, [True, True], "stop")
    return Made(Rollout([[3, 4]], [completion], version, torch.ones(1, 1)))


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == THREAD]


def test_windows_are_written_and_rewarded_one_after_the_other_in_the_thread_and_end_here():
    ahead, seen = Ahead(10.0), []

    def note(what: str) -> str:
        seen.append((what, threading.current_thread().name))
        return what

    for number in range(2):
        ahead.ask(
            (0, number),
            lambda number=number: note(f"write {number}"),
            lambda what: (note(what.replace("write", "reward")), lambda: (note("here"), made())[1])[1],
        )
    ahead.settle()
    there = [(f"{what} {number}", THREAD) for number in range(2) for what in ("write", "reward")]
    assert seen == there
    assert isinstance(ahead.take((0, 1)), Made)
    assert seen[4:] == [("here", threading.current_thread().name)]
    assert [(0, n) in ahead for n in range(2)] == [True, False]
    ahead.end()


def test_without_a_thread_a_window_is_written_when_it_is_taken():
    ahead, seen = Ahead(10.0), []
    before = {*threading.enumerate()}  # those of tests before may not have come to their end yet
    ahead.later((0, 0), lambda: (seen.append(1), made())[1])
    assert not seen
    ahead.take((0, 0))
    assert (seen, {*threading.enumerate()} - before) == ([1], set())


def test_what_fails_is_told_before_anything_else_is_asked_and_when_it_is_taken():
    ahead = Ahead(10.0)
    ahead.ask((0, 0), lambda: [][0], lambda _: made)
    ahead.ask((0, 1), lambda: None, lambda _: made)
    with pytest.raises(IndexError):
        ahead.settle()
    kept = ahead.kept()
    assert [type(kept[0, n]) for n in range(2)] == [IndexError, Made]
    with pytest.raises(IndexError):
        ahead.take((0, 0))
    assert ahead.take((0, 1)) is kept[0, 1], "what a checkpoint was written of is what is learned from"
    ahead.end()


def test_a_reward_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr("lowtide.run.ahead.POLL_SECONDS", 0.01)
    ahead, release = Ahead(0.05), threading.Event()
    ahead.ask((0, 0), lambda: None, lambda _: (release.wait(5), made)[1])
    with pytest.raises(Hangs, match=r"heartbeat_stale_after_s=0.05 seconds: find what they wait for"):
        ahead.take((0, 0))
    release.set()
    ahead.end()


def test_the_thread_ends_and_does_nothing_more():
    ahead, seen, release = Ahead(10.0), [], threading.Event()
    ahead.ask((0, 0), lambda: release.wait(5), lambda _: (seen.append("rewarded"), made)[1])
    ahead.ask((0, 1), lambda: seen.append("written"), lambda _: made)
    ahead.end()
    release.set()
    until = time.monotonic() + 5
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert (threads(), seen, (0, 0) in ahead) == ([], [], False)


class Maker(SimpleNamespace):
    """What `BesideTraining` needs of a maker."""


@pytest.fixture
def maker(monkeypatch) -> Any:
    monkeypatch.setattr("lowtide.run.ahead.replace", lambda maker, **more: SimpleNamespace(**{**vars(maker), **more}))
    rewarded: list[str] = []
    found = Maker(tokenizer=object(), rewards=SimpleNamespace(), rewarded=rewarded)
    found.write = lambda *_: (made(logprobs=found.logprobs), None)
    found.reward = lambda *_: rewarded.append(threading.current_thread().name)
    found.runner = SimpleNamespace(phases=SimpleNamespace(during=lambda phase: threading.Lock()))
    found.logprobs = (-1.0, -2.0)
    return found


@pytest.mark.parametrize("unknown", [math.nan, -math.inf])
def test_tokens_of_unknown_probability_are_refused(maker, unknown):
    maker.logprobs = (-1.0, unknown)
    with pytest.raises(ValueError, match=r"completion 0 .* missing or not finite.* or set max_staleness=0"):
        BesideTraining(maker).write([], (0,), 0)


@pytest.mark.parametrize("models", [[], ["one"]])
def test_reward_models_run_where_the_policy_is_trained(maker, models):
    maker.rewards.reward_models = models
    beside, ahead = BesideTraining(maker), Ahead(10.0)
    ahead.ask((0, 0), lambda: beside.write([], (0,), 0), lambda found: beside.reward(found, None))
    ahead.take((0, 0))
    assert maker.rewarded == [threading.current_thread().name if models else THREAD]
    ahead.end()


def test_a_window_is_saved_as_it_is(tmp_path):
    before = made(version=3)
    before.prompts, before.completions, before.extra = ["p"], ["c"], {"note": [object()]}
    before.logged, before.calls = {"n": [1.5]}, [(2, 1)]
    before.save(tmp_path / "w", place=(1, 4), texts=True)
    after, place = Made.load(tmp_path / "w")
    assert place == (1, 4)
    assert (after.prompts, after.completions, after.logged, after.calls) == (["p"], ["c"], {"n": [1.5]}, [(2, 1)])
    assert (after.rollout.version, after.rollout.rewards.tolist()) == (3, [[1.0]])
    assert (after.rollout.completions[0].logprobs, type(after.extra["note"][0])) == ([-1.0, -2.0], str)
    before.save(tmp_path / "w", place=(1, 4), texts=False)
    assert Made.load(tmp_path / "w")[0].prompts == ()
