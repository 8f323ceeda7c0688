"""Which cells of a parametrized test are slow, and where Triton's interpreter can run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch


def slow_but(quick: Iterable[Any], values: Iterable[Any], swept: Iterable[Any] = ()) -> list[Any]:
    """The values of a parameter, with all but the quick ones marked `slow`, and some for the sweep alone.

    Of two parameters, a cell is quick if both its values are.
    """
    quick, values, swept = list(quick), list(values), list(swept)
    assert all(each in values for each in (*quick, *swept)), f"{quick} and {swept} are not all of {values}"
    return [value if value in quick else _slow(value, swept=value in swept) for value in values]


def slow_or_sweep(cells: Iterable[tuple[Any, ...]], slow: Collection[tuple[Any, ...]]) -> list[Any]:
    """Cells of a long list: some are slow tests, and the others are for the sweep, which are slow too."""
    marks = lambda cell: (pytest.mark.slow, *[pytest.mark.sweep] * (cell not in slow))  # noqa: E731
    return [pytest.param(*cell, marks=marks(cell)) for cell in cells]


def _slow(value: Any, *, swept: bool) -> Any:
    """A tuple is of several parameters."""
    marks = (pytest.mark.slow, *[pytest.mark.sweep] * swept)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)


NEEDS_TRITON = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which comes with the CUDA builds of torch"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here instead of interpreting: see tests/gpu"),
]
"""Of a case that runs kernels in Triton's interpreter."""
