"""The labels of a dataset: the columns that hold them, their names, and their numbers in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from datasets import Dataset

from lowtide.data.formats.conversation import quoted

ROWS_AT_A_TIME = 10_000
MOST_LABELS = 10**6
UNNAMED = "LABEL_{}"
"""How transformers calls labels whose names it is not told."""


def column_of(
    columns: Sequence[str], asked: str | None, option: str, usual: Sequence[str], what: str, source: str
) -> str:
    """The column that a user named by an option, or the first usual one that is there.

    Raises:
        ValueError: there is none; names the columns that there are.
    """
    for name in (asked,) if asked else usual:
        if name in columns:
            return name
    there = f"its columns are {quoted(columns)}"
    if asked:
        raise ValueError(f"{source} has no column {asked!r}, which {option} names: {there}")
    raise ValueError(f"{source} has no column of {what} ({quoted(usual)}): {there}; name it by {option}")


def distinct_labels(dataset: Dataset, column: str) -> set[Any]:
    """All that is found in a column, or in its lists."""
    found: set[Any] = set()
    for part in dataset.with_format("arrow").select_columns([column]).iter(batch_size=ROWS_AT_A_TIME):
        values: Any = part[column].combine_chunks()  # type: ignore[index]
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        found.update((values.flatten() if is_list else values).unique().to_pylist())
    return found - {None}


def names_of_found(found: set[Any]) -> tuple[str, ...]:
    """Names for labels that were found: texts in alphabetical order; numbers are called as by transformers, LABEL_0 and
    so on up to the largest.

    Raises:
        ValueError: the largest is so large that it is no number of a label.
    """
    named = {each for each in found if isinstance(each, str)}
    if named:
        return tuple(sorted(named))
    largest = max((int(each) for each in found if isinstance(each, int)), default=-1)
    if largest >= MOST_LABELS:
        raise ValueError(
            f"the rows have the label {largest}, and labels are numbered from 0 on, to {MOST_LABELS - 1} at most, with "
            "a row of the model's head for each: number them from 0, or store them as texts"
        )
    return unnamed(largest + 1)


def unnamed(count: int) -> tuple[str, ...]:
    """Names for so many labels that have none."""
    return tuple(UNNAMED.format(number) for number in range(count))


def numbers_of(labels: Sequence[str], declared: Sequence[str] | None, *, texts: bool) -> dict[Any, int]:
    """From a label as rows have it to its number in `labels`, the model's.

    Args:
        declared: the names of the rows' numbers, where the dataset declares them.
        texts: whether the rows have names in place of numbers.
    """
    known = {name: number for number, name in enumerate(labels)}
    if declared is not None:
        return {number: known[name] for number, name in enumerate(declared) if name in known}
    return known if texts else {number: number for number in known.values()}


def shown_labels(labels: Sequence[str]) -> str:
    """The first few labels, for a message."""
    return ", ".join(labels[:12]) + (f" and {len(labels) - 12} more" if len(labels) > 12 else "")
