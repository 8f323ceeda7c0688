"""A user's own memory technique, by its path, `my_module.MY_TECHNIQUE`, or by the name of an entry point of a package.

What stands there is a `Technique`, as each row of `memory.table` is: trainers, the start-up report and predictions go
by it as by those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

from lowtide.memory.technique import Technique
from lowtide.users_functions import called_for_user, find_named

GROUP = "lowtide.techniques"
"""The group of entry points."""
OPTION = "techniques"
CALLED = ("refused", "idle", "prepare", "begin")
"""What is called with the site, and gives a value."""


@functools.cache
def own_technique(name: str) -> Technique:
    """The technique of a path or of an entry point; it is on.

    Raises:
        ValueError: there is none, or something else, or what it declares cannot be called.
    """
    point = next((each for each in entry_points(group=GROUP) if each.name == name), None)
    if point is None:
        found = find_named(name, f"{OPTION}:")
    else:
        with called_for_user(OPTION, point):
            found = point.load()
    if not isinstance(found, Technique):
        raise ValueError(
            f"{OPTION}: {name!r} is of type {type(found).__name__}, and no Technique of lowtide.memory.technique"
        )
    for part in (*CALLED, "around"):
        value = getattr(found, part)
        if value is not None and not callable(value):
            raise ValueError(f"{OPTION}: {name!r} has {part}={value!r}, which is no function of a Site")
    called = {part: _called(value) for part in CALLED if (value := getattr(found, part)) is not None}
    around = None if found.around is None else _entered(found.around)
    return dataclasses.replace(
        found, options={OPTION: [name]}, is_on=lambda options: True, named=True, chosen=None, around=around, **called
    )


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of whose errors it is said that they come from it."""

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        with called_for_user(OPTION, function):
            return function(*given)

    return call


def _entered(around: Callable[..., Any]) -> Callable[..., Any]:
    """Gives what is entered for each forward."""

    def of_site(site: Any) -> Callable[[], Any]:
        with called_for_user(OPTION, around):
            enter = around(site)

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            with called_for_user(OPTION, enter):
                context = enter()
            with context:
                yield

        return entered

    return of_site
