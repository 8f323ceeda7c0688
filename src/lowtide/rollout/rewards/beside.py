"""What reward functions log of completions beside their rewards, by `log_extra` and `log_metric`, as TRL has them.

A column that is a value short would stand beside other completions than it is of, and NaN hides in a mean what the
other calls logged. So columns are checked once all functions returned, since a function may log a column in parts.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

OF_THE_TABLE = ("step", "prompt", "completion", "advantage")
"""Columns of the table of completions that are there already."""

logger = logging.getLogger(__name__)


class LoggedWrongly(ValueError):
    """A reward function called `log_extra` or `log_metric` with what they do not take."""


class LoggedBeside:
    """The columns and numbers that reward functions logged of some completions.

    Args:
        count: completions.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.columns: dict[str, list] = {}
        self.numbers: dict[str, list[float]] = {}

    def log_extra(self, name: str, values: Any) -> None:
        """Adds values to a column.

        Raises:
            LoggedWrongly: they are no list, or the name is none for a column.
        """
        _check_name("log_extra", name)
        if name in OF_THE_TABLE:
            raise LoggedWrongly(f"log_extra({name!r}, ...) would replace a column that is there: take another name")
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
            raise LoggedWrongly(
                f"log_extra({name!r}, ...) got a {type(values).__name__}: it takes a list of one value a completion"
            )
        self.columns.setdefault(name, []).extend(values)

    def log_metric(self, name: str, value: Any) -> None:
        """Adds a number, of which the mean is logged; warns of one that is not finite.

        Raises:
            LoggedWrongly: it is no number, or the name is none.
        """
        _check_name("log_metric", name)
        try:
            number = None if isinstance(value, str) else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None:
            raise LoggedWrongly(f"log_metric({name!r}, {value!r:.80}): the value must be one number")
        if not math.isfinite(number):
            _say_not_finite(name)
        self.numbers.setdefault(name, []).append(number)

    def check(self) -> None:
        """Refuses columns that do not have one value a completion.

        Raises:
            LoggedWrongly: naming the column.
        """
        for name, values in self.columns.items():
            if len(values) != self.count:
                raise LoggedWrongly(
                    f"log_extra({name!r}, ...) got {len(values)} values for {self.count} completions: give one for "
                    "each, None where there is none"
                )


@functools.cache
def _say_not_finite(name: str) -> None:
    """Says once of each metric."""
    logger.warning(f"log_metric({name!r}, ...) got NaN or infinity: the mean that is logged of it is no number")


def _check_name(function: str, name: Any) -> None:
    if not isinstance(name, str):
        raise LoggedWrongly(f"{function}({name!r:.80}, ...): the name must be text")
