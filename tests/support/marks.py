"""Which cells of a parametrized test are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values of a parameter, with all but the quick ones marked `slow`.

    Of two parameters, a cell is quick if both its values are.
    """
    quick, values = list(quick), list(values)
    assert all(each in values for each in quick), f"{quick} are not all of {values}"
    return [value if value in quick else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    """A tuple is of several parameters."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
