"""Functions that a user passes, such as `compute_metrics`: what they raise goes on, with a note of whose it is.

The traceback is what the function's author needs; among the frames of a training the note says where to look.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stopping_nobody() -> Iterator[None]:
    """Turns what is no `Exception` (SystemExit, KeyboardInterrupt, GeneratorExit) into one, unless the user interrupted
    the run meanwhile: what is called inside of a run must not end it without a word.

    Raises:
        RuntimeError: names what was raised.
    """
    interrupted: list[bool] = []
    before: Any = signal.getsignal(signal.SIGINT)
    watched = threading.current_thread() is threading.main_thread() and callable(before)

    def note(*given: Any) -> Any:
        interrupted.append(True)
        return before(*given)

    if watched:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if interrupted:
            raise
        raise RuntimeError(": ".join([type(error).__name__, *map(str, error.args)])) from error
    finally:
        if watched:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def called_for_user(argument: str, function: Any) -> Iterator[None]:
    """Around the call of a function that came as an argument."""
    try:
        with stopping_nobody():
            yield
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        error.add_note(f"This was raised by {argument}, a function that was passed ({name}).")
        raise
