"""Tests that are not marked `slow` are short: the rule of CONTRIBUTING.md, which runs of `make test` enforce.

What counts is the CPU time of a test's own call, with that of the processes which it started and waited for: a busy
machine makes it hardly longer. Fixtures do not count, since several tests share some of them. Nor does what a machine
measures once and keeps, which falls to whichever test comes first.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

ASKED, LIMIT = 1.0, 10.0
"""CPU seconds: above the first a test is listed, above the second it fails. What lies between is the tolerance for slow
machines, and for the test that is the first to import something: on two busy threads of one core the same test has been
seen to take four times the CPU seconds."""
NAME = "cpu_seconds"
_left_out = 0.0


def cpu_seconds() -> float:
    """CPU time of this process, and of those children of it that have ended, without what is not counted."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system - _left_out


def not_counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose CPU time is no test's."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _left_out
        began = cpu_seconds()
        try:
            return function(*args, **kwargs)
        finally:
            _left_out += cpu_seconds() - began

    return run


def checked(config: pytest.Config) -> bool:
    """Whether the run is of the tests without the mark alone; a GPU takes seconds to begin."""
    return config.getoption("markexpr") == "not slow" and not torch.cuda.is_available()


def check_is_short(item: pytest.Item, seconds: float) -> None:
    """Notes a test's CPU time, and fails the test if it is above the limit."""
    item.user_properties.append((NAME, seconds))
    if seconds > LIMIT:
        pytest.fail(
            f"it passed, but took {seconds:.1f} s of CPU time, and a test that is not marked `slow` has {ASKED:g} s"
            f" ({LIMIT:g} s at most): make it cheaper, or mark it slow where a fast test finds the same errors",
            pytrace=False,
        )


def long_tests(reports: list[Any]) -> list[str]:
    """Lines of the tests that took longer than is asked, the longest first."""
    found = [(dict(each.user_properties).get(NAME, 0.0), each.nodeid) for each in reports]
    return [f"{seconds:5.1f} s  {name}" for seconds, name in sorted(found, reverse=True) if seconds > ASKED]
