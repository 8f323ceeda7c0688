"""Receives SIGTERM while a run trains, also while the main thread computes or waits for other ranks.

Python calls a signal's handler between two of its instructions, which a long kernel or a wait for another rank delays
without end. The system's part of the handler writes the signal's number into a pipe at once; a thread reads it there,
tells the run, and ends the process when the grace period is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that SIGTERM ended, by convention."""

END = b"\0"
"""What ends the thread: no signal has this number."""

_received: list[StopRequest] = []
"""The requests whose signals this process handles now."""


class StopRequest:
    """Whether this process was asked to stop, and how long it may take.

    Args:
        grace: seconds between the signal and the end of the process.
        on_request: called once, in a thread, when the signal is there.
        on_deadline: called in that thread when the grace period is over, before the process ends.
    """

    def __init__(self, grace: float, on_request: Callable[[], object], on_deadline: Callable[[], object]) -> None:
        self.grace, self.on_request, self.on_deadline = grace, on_request, on_deadline
        self.requested = False
        self._finished = threading.Event()
        self._earlier: Any = None
        self._read = self._write = -1

    @contextlib.contextmanager
    def received(self) -> Iterator[None]:
        """Around what can be stopped. Other handlers of SIGTERM are called too, and are back afterwards. Outside of
        the main thread, with no grace, and where SIGTERM is ignored or handled by C code, it is left as it is."""
        main = threading.current_thread() is threading.main_thread()
        if self.grace <= 0 or not main or signal.getsignal(signal.SIGTERM) in (signal.SIG_IGN, None):
            yield
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._earlier = signal.signal(signal.SIGTERM, self._handle)
        others_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(others_pipe,), name="lowtide-signals", daemon=True)
        thread.start()
        _received.append(self)
        try:
            yield
        finally:
            _received.remove(self)
            self._finished.set()
            signal.set_wakeup_fd(others_pipe)
            signal.signal(signal.SIGTERM, self._earlier)
            os.write(self._write, END)
            thread.join()
            self._close()

    def forget(self) -> None:
        """In a forked process: signals are handled as before, and the pipe is the parent's alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._earlier)
        self._close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if callable(self._earlier):
            self._earlier(number, frame)

    def _watch(self, others_pipe: int) -> None:
        while END not in (numbers := os.read(self._read, 64)):
            if others_pipe >= 0:
                with contextlib.suppress(OSError):
                    os.write(others_pipe, numbers)
            if signal.SIGTERM in numbers and not self.requested:
                self.requested = True
                threading.Thread(target=self._deadline, daemon=True).start()
                self.on_request()

    def _close(self) -> None:
        os.close(self._write)
        os.close(self._read)

    def _deadline(self) -> None:
        if not self._finished.wait(self.grace):
            self.on_deadline()
            os._exit(TERMINATED)


def _forget_in_child() -> None:
    """A forked process (a worker of a data loader) is not this run: signals to it are its own."""
    for request in _received:
        request.forget()
    _received.clear()


os.register_at_fork(after_in_child=_forget_in_child)
