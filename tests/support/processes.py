"""Further processes for tests, forked from one that has imported lowtide and what it needs.

A process that begins anew takes some seconds to import torch and transformers; a forked one takes milliseconds. The
server that they are forked from has computed nothing, so it has no threads that a fork would lose. It keeps the
environment that it started with: what a test sets in `os.environ` is handed over here.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

PRELOAD = "tests.support.preload"
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
    mp.start_processes(_rank, (function, *args), nprocs=ranks, start_method="forkserver")


def _rank(rank: int, function: Callable[..., object], *args: object) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate sets the threads again, and more where nothing is said
    function(rank, *args)
