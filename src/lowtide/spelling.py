"""Mistyped names: refused, with the nearest of those that there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where some known name is close to this one, else nothing."""
    matches = get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def check_arguments_known(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuses arguments that a function takes by name and does not know, as Python does for those of a signature.

    Raises:
        TypeError: names the first, and the nearest one that there is.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{function} has no argument {name!r}{nearest(name, known)}")
