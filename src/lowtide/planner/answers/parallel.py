"""A function of several things, on as many processes as there are cores.

Processes are forked where that is possible, which is on Linux, so that none has to import anything again. To be called
by a process in which nothing else computes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

A = TypeVar("A")
R = TypeVar("R")
MOST = 4
"""Processes: each takes some hundred megabytes."""
_work: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []
"""What forked processes find: it need not go through a pipe."""


def each_of(function: Callable[[A], R], things: Sequence[A]) -> list[R]:
    """What a function makes of each, in their order. Results go through a pipe; things and function do not."""
    processes = min(MOST, len(things), _cores())
    if processes < 2 or sys.platform != "linux":
        return [function(each) for each in things]
    _work.append((function, things))
    try:
        with multiprocessing.get_context("fork").Pool(processes, torch.set_num_threads, (1,)) as pool:
            return pool.map(_done, range(len(things)), chunksize=1)
    finally:
        _work.pop()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _done(number: int) -> Any:
    function, things = _work[-1]
    return function(things[number])
