"""Further processes for tests, forked from one that has imported lowtide and what it needs.

A process that begins anew takes some seconds to import torch and transformers; a forked one takes milliseconds. The
server that they are forked from has computed nothing, so it has no threads that a fork would lose. It keeps the
environment that it started with: what a test sets in `os.environ` is handed over here.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.support.heap import young_heap

PRELOAD = "tests.support.ranks.preload"
"""The module that the server imports."""


def server_context() -> ForkServerContext:
    """Starts processes from the server; the first call settles what it imports."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([PRELOAD])
    return made


def run_ranks(function: Callable[..., object], *args: object, ranks: int = 2) -> None:
    """Calls `function(rank, *args)` in so many processes and waits for all of them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised.
        torch.multiprocessing.ProcessExitedException: a rank died.
    """
    import torch.multiprocessing as mp

    server_context()
    with _room_for(ranks):
        mp.start_processes(_rank, (function, *args), nprocs=ranks, start_method="forkserver")


@contextlib.contextmanager
def _room_for(ranks: int) -> Iterator[None]:
    """Lets more ranks than two run by themselves, whatever other workers of the tests want to start meanwhile: eight
    processes that wait for one another spend most of two cores on switching between them."""
    place = Path(tempfile.gettempdir()) / f"lowtide-ranks-{os.getuid()}"
    with place.open("a") as held:
        with place.with_suffix(".door").open("a") as door:  # who waits for the others to leave lets no more of them in
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(held, fcntl.LOCK_EX if ranks > 2 else fcntl.LOCK_SH)
        yield


def _rank(rank: int, function: Callable[..., object], *args: object) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate sets the threads again, and more where nothing is said
    with young_heap():
        function(rank, *args)
