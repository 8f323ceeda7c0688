"""Signals as a process in a shell's foreground has them.

What a shell runs in the background, or `nohup` starts, ignores some of them, and so would all that it starts.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""What Python sets at its start where nothing is ignored."""


@contextlib.contextmanager
def in_the_foreground() -> Iterator[None]:
    """While it lasts, no signal that tests send is ignored; to be entered in the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in HANDLERS.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
