"""From the inside of `concurrent.futures`: which threads the interpreter waits for at its end."""

from __future__ import annotations

from concurrent.futures import thread as pools
from typing import Any


def abandon_daemon_pools() -> None:
    """Lets the interpreter end while thread pools work that daemon threads have started.

    A pool's threads are daemons where the thread that started them is one, and the interpreter waits for them all the
    same: for a request that never returns, for ever.
    """
    waited_for: Any = pools._threads_queues
    for thread in list(waited_for):
        if thread.daemon:
            waited_for.pop(thread, None)
