"""Receives SIGTERM and Ctrl-C, also while the main thread computes or waits for other ranks: a training finishes its
step, and everything else (loading, preparing rows, evaluating, saving) ends at once.

Python calls a signal's handler between two of its instructions, which a long kernel or a wait for another rank delays
without end. The system's part of the handler writes the signal's number into a pipe at once; a thread reads it there,
tells the run, and ends the process when the grace period is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lowtide.trainers.checkpoints.lock import leave_folders

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that SIGTERM ended, by convention."""

INTERRUPTED = 128 + signal.SIGINT
"""That of one which Ctrl-C ended."""
TOGETHER = 1.0
"""Seconds in which several SIGINT are one Ctrl-C, for ranks: the terminal sends it, and their launcher passes it on."""

PATIENCE = 5.0
"""Seconds in which a process that saves nothing ends by itself; one that waits for other ranks cannot."""
END = b"\0"
"""What ends the thread: no signal has this number."""

_received: list[StopRequest] = []
"""The requests whose signals this process handles now."""


class Stopped(SystemExit):
    """This process was stopped by SIGTERM; the exit status is 143."""

    def __init__(self, message: str) -> None:
        super().__init__(TERMINATED)
        self.message = message


class StopRequest:
    """Whether this process was asked to stop, and how long it may take.

    Args:
        grace: seconds between the signal and the end of the process.
        on_request: called in a thread when SIGTERM is there, and at the first Ctrl-C.
        on_deadline: called in that thread when the grace period after SIGTERM is over, before the process ends.
        ends: raised in the main thread when SIGTERM is there; None where that looks at `requested`.
        interrupts: whether Ctrl-C asks to stop too; a second one raises KeyboardInterrupt, and ends a process that does
            not come to that.
        together: seconds in which several SIGINT are one Ctrl-C.

    Attributes:
        terminated: whether SIGTERM is there.
        pressed: how often Ctrl-C was.
    """

    def __init__(
        self,
        grace: float,
        on_request: Callable[[], object],
        on_deadline: Callable[[], object] = lambda: None,
        ends: Stopped | None = None,
        *,
        interrupts: bool = False,
        together: float = 0.0,
    ) -> None:
        self.grace, self.on_request, self.on_deadline, self.ends = grace, on_request, on_deadline, ends
        self.interrupts, self.together = interrupts, together
        self.terminated, self.pressed = False, 0
        self._last_press = -together
        self._handled: list[float] = []
        """When the main thread came to handle Ctrl-C."""
        self._finished = threading.Event()
        self._raised, self._tells = False, True
        self._earlier: Any = None
        self._earlier_interrupt: Any = None
        self._read = self._write = -1

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.terminated or self.pressed > 0

    @contextlib.contextmanager
    def received(self) -> Iterator[None]:
        """Around what can be stopped. Other handlers of SIGTERM are called too, but for those of a request around this
        one, and are back afterwards. Outside of the main thread, with no grace, and where SIGTERM is ignored or handled
        by C code, it is left as it is."""
        main = threading.current_thread() is threading.main_thread()
        if self.grace <= 0 or not main or signal.getsignal(signal.SIGTERM) in (signal.SIG_IGN, None):
            yield
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._tells = not (_received and _received[-1].handles())
        self._earlier = signal.signal(signal.SIGTERM, self._handle)
        self.interrupts = self.interrupts and callable(signal.getsignal(signal.SIGINT))
        if self.interrupts:
            self._earlier_interrupt = signal.signal(signal.SIGINT, self._handle_interrupt)
        others_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        told = others_pipe if self._tells else -1
        thread = threading.Thread(target=self._watch, args=(told,), name="lowtide-signals", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for its stack: the run goes on, to say what it has no memory for
            self._put_back(others_pipe)
            yield
            return
        _received.append(self)
        try:
            yield
        finally:
            self._finished.set()
            os.write(self._write, END)
            thread.join()  # it says what the signal led to
            _received.remove(self)
            self._put_back(others_pipe)

    def handles(self) -> bool:
        """Whether its handler is that of the process now."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def forget(self) -> None:
        """In a forked process: SIGTERM is handled as before, and the pipe is the parent's alone. Ctrl-C is the parent's
        to answer: a terminal sends it to workers too."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._earlier)
        if self.interrupts:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if callable(self._earlier) and self._tells:
            self._earlier(number, frame)
        if self.ends is not None and not self._raised:
            self._raised = True
            raise self.ends

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = bool(self._handled) and now - self._handled[-1] >= self.together
        self._handled.append(now)
        if again or self.pressed > 1:
            self._earlier_interrupt(number, frame)

    def _watch(self, others_pipe: int) -> None:
        numbers = b""
        while END not in numbers:
            numbers = os.read(self._read, 64)
            if others_pipe >= 0 and (others := numbers.replace(END, b"")):
                with contextlib.suppress(OSError):
                    os.write(others_pipe, others)
            others_alone = self.ends is not None and not self.handles()
            if signal.SIGTERM in numbers and not self.terminated and not others_alone:
                self.terminated = True
                self._end_after(self.grace, TERMINATED, self.on_deadline)
                self.on_request()
            if signal.SIGINT in numbers and self.interrupts:
                self._press()

    def _press(self) -> None:
        now = time.monotonic()
        if now - self._last_press < self.together:
            return
        self._last_press, self.pressed = now, self.pressed + 1
        if self.pressed == 1:
            self.on_request()
        elif self.pressed == 2:
            self._end_after(PATIENCE, INTERRUPTED, lambda: None)

    def _end_after(self, seconds: float, status: int, said: Callable[[], object]) -> None:
        """Ends the process after some seconds, unless it has come to an end by then."""

        def end() -> None:
            if not self._finished.wait(seconds):
                said()
                leave_folders()
                os._exit(status)

        threading.Thread(target=end, daemon=True).start()

    def _put_back(self, others_pipe: int) -> None:
        """Leaves signals as they were found."""
        signal.set_wakeup_fd(others_pipe)
        signal.signal(signal.SIGTERM, self._earlier)
        if self.interrupts:
            signal.signal(signal.SIGINT, self._earlier_interrupt)
        self._close()

    def _close(self) -> None:
        os.close(self._write)
        os.close(self._read)


@contextlib.contextmanager
def stopping_at_once(doing: str) -> Iterator[None]:
    """Around what leaves nothing to save when SIGTERM ends it. Where a training is told of the signal, or a handler of
    another library or of the user, that is left as it is.

    Args:
        doing: what the message says is done, as in "making the trainer".

    Raises:
        Stopped: SIGTERM. A process that does not come to it within some seconds ends with the same status.
    """
    nested = bool(_received) and _received[-1].handles() and _received[-1].ends is not None
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and not nested:
        yield
        return
    message = f"stopped by SIGTERM while {doing}; nothing more is written"

    def say() -> None:
        if os.environ.get("RANK", "0") in ("0", ""):
            print(f"lowtide: {message}", file=sys.stderr, flush=True)

    with StopRequest(PATIENCE, say, ends=Stopped(message)).received():
        yield


def _forget_in_child() -> None:
    """A forked process (a worker of a data loader) is not this run: signals to it are its own."""
    for request in _received:
        request.forget()
    _received.clear()


os.register_at_fork(after_in_child=_forget_in_child)
