"""Chat templates with limits: they come with a model or a data set, and may loop without end or write without end.

Jinja's sandbox, in which transformers compiles them, bounds `range` and nothing else. transformers looks its class up
in the module `chat_template_utils` for each template, where `limit_templates` puts a subclass. A loop is ended from
outside, by `ends_within`: between two steps of the interpreter it looks at the time and at the memory that was added.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MOST_CHARACTERS = 1 << 28
"""Of a text or a list that a template makes at once."""
MOST_BYTES = 4 << 30
"""Memory that a template may add."""
_MOST_POWER = 10_000
_TICK = 0.25
"""Seconds between two looks."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, in which no operation makes gigabytes at once."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for repeated, count in ((left, right), (right, left)):
                sized = isinstance(repeated, str | list | tuple)
                if sized and isinstance(count, int) and len(repeated) * count > MOST_CHARACTERS:
                    raise SecurityError(f"it repeats something to more than {MOST_CHARACTERS:,} characters")
        if operator == "**" and isinstance(right, int) and right > _MOST_POWER:
            raise SecurityError(f"it takes a number to a power above {_MOST_POWER:,}")
        if operator == "%" and isinstance(left, str) and _has_wide_field(left):
            raise SecurityError("it formats something to a width of a million characters or more")
        return super().call_binop(context, operator, left, right)


def _has_wide_field(text: str) -> bool:
    return any(len(digits) > 6 for digits in "".join(c if c.isdigit() else " " for c in text).split())


def limit_templates() -> None:
    """Has transformers compile chat templates in `LimitedEnvironment` from here on."""
    module: Any = chat_template_utils
    module.ImmutableSandboxedEnvironment = LimitedEnvironment


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Ends what takes longer or adds more than `MOST_BYTES`, in the main thread, where nothing else has set the timer.

    Raises:
        ValueError: it did.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    until, most = time.monotonic() + seconds, _resident() + MOST_BYTES

    def look(*_: object) -> None:
        if time.monotonic() > until:
            raise ValueError(f"it takes more than {seconds:g} seconds, as one that loops without end")
        if _resident() > most:
            raise ValueError(f"it adds more than {MOST_BYTES >> 30} GiB, as one that writes without end")

    given = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(_TICK, seconds), _TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, given)


def _resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
