"""A function of several things, on as many processes as there are cores.

Processes are forked where that is possible, which is on Linux, so that none has to import anything again. Each begins
at a part of its own of the list, and goes on where others have not been: neighbours in the list are alike, and what a
process keeps of one serves it for the next. To be called by a process in which nothing else computes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

A = TypeVar("A")
R = TypeVar("R")
MOST = 4
"""Processes: each takes some hundred megabytes."""


@dataclass(frozen=True)
class _Work:
    """What forked processes find: it need not go through a pipe."""

    function: Callable[[Any], Any]
    things: Sequence[Any]
    begun: Any
    """Of each thing whether a process has begun with it, in memory that all of them share."""


_work: list[_Work] = []


@contextlib.contextmanager
def counting_references() -> Iterator[None]:
    """While it lasts, nobody looks for garbage: a trace frees what it makes by counting references, and has so many
    objects that looking at them takes as long as making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def each_of(function: Callable[[A], R], things: Sequence[A]) -> list[R]:
    """What a function makes of each, in their order. Results go through a pipe; things and function do not."""
    processes = min(processes_at_once(), len(things))
    if processes < 2:
        return [function(each) for each in things]
    fork = multiprocessing.get_context("fork")
    _work.append(_Work(function, things, fork.Array("b", len(things))))
    try:
        with fork.Pool(processes, _begin) as pool:
            starts = [number * len(things) // processes for number in range(processes)]
            found = dict(pair for part in pool.map(_done, starts, chunksize=1) for pair in part)
    finally:
        _work.pop()
    return [found[number] for number in range(len(things))]


def processes_at_once() -> int:
    """How many processes may compute at a time; 1 where none can be forked."""
    return min(MOST, _cores()) if sys.platform == "linux" else 1


def beside(function: Callable[[A], R], things: Sequence[A]) -> list[R | None]:
    """What a function makes of each: of the first here, and of each other in a process of its own meanwhile; None of
    one whose process ended without a word. Results go through a pipe."""
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for each in things[1:]:
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_sent, args=(theirs, function, each), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found: list[R | None] = [function(things[0])]
    for ours, process in zip(pipes, processes, strict=True):
        try:
            found.append(ours.recv())
        except EOFError:
            found.append(None)
        process.join()
    return found


def _sent(pipe: Any, function: Callable[[A], R], thing: A) -> None:
    _begin()
    pipe.send(function(thing))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    torch.set_num_threads(1)
    gc.disable()  # as in `counting_references`, for as long as the process lives


def _done(start: int) -> list[tuple[int, Any]]:
    """What a process makes of the things from one on, as far as no other has begun with them."""
    work, found = _work[-1], []
    for number in [*range(start, len(work.things)), *range(start)]:
        with work.begun.get_lock():
            begun, work.begun[number] = work.begun[number], 1
        if not begun:
            found.append((number, work.function(work.things[number])))
    return found
