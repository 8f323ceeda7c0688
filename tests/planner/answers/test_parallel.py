"""Several things on several processes: each once, in their order."""

from __future__ import annotations

import os
import sys
import time

import pytest

from lowtide.planner.answers import parallel


def slow_first(thing: int) -> tuple[int, int]:
    time.sleep(0.3 if thing == 0 else 0.01)
    return thing * thing, os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_each_is_done_once_and_results_are_in_order(monkeypatch):
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    found = parallel.each_of(slow_first, range(9))
    assert [value for value, _ in found] == [n * n for n in range(9)]
    by_process = [process for _, process in found]
    assert len(set(by_process)) == 2
    assert by_process.count(by_process[0]) < 5, "the other process helps with what the first has left"
    assert os.getpid() not in by_process


def test_on_one_core_nothing_is_forked(monkeypatch):
    monkeypatch.setattr(parallel, "_cores", lambda: 1)
    assert parallel.each_of(slow_first, [3]) == [(9, os.getpid())]
