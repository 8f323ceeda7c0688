"""Several things on several processes: each once, in their order."""

from __future__ import annotations

import os
import sys
import time

import pytest

from lowtide.planner import parallel


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


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_the_first_is_done_here_and_the_others_beside_it():
    found = parallel.beside(slow_first, [0, 1, 2])
    assert [each and each[0] for each in found] == [0, 1, 4]
    processes = [each and each[1] for each in found]
    assert processes[0] == os.getpid()
    assert len({*processes}) == 3


def dies(thing: int) -> int:
    if thing == 1:
        os._exit(9)
    return thing


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_one_whose_process_dies_is_left_out():
    assert parallel.beside(dies, [0, 1, 2]) == [0, None, 2]
