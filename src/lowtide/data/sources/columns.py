"""Columns under other names than formats have: `columns`, from the name that a column is to have to the one it has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from lowtide.data.formats.conversation import quoted
from lowtide.data.formats.likely import WORDS
from lowtide.data.sources.titles import entitled, title_of
from lowtide.spelling import nearest

logger = logging.getLogger(__name__)


def column_names(rows: Dataset | IterableDataset) -> list[str]:
    """The columns; of a stream that does not tell them, those of its first row."""
    return list(rows.column_names or next(iter(rows), {}))


def with_columns(rows: Any, columns: Mapping[str, Any], title: str = "columns") -> Any:
    """The rows of a `Dataset` or a stream, with other names of columns. A column whose name another one takes is left
    out, with a warning.

    Args:
        columns: from the names that columns are to have to those that they have.
        title: what messages call the mapping.

    Raises:
        ValueError: there is no such column; names the nearest.
    """
    source = title_of(rows, "train")
    there, asked = column_names(rows), list(columns.values())
    if not all(isinstance(each, str) for each in asked):
        raise ValueError(f"{title} is {dict(columns)!r}; it must be the name of a column for each that is needed.")
    missing = [each for each in asked if each not in there]
    if missing:
        turned = {name: other for other, name in columns.items()}
        hint = f": turn it round, {title}={turned}" if {*columns} <= {*there} - {*WORDS} else nearest(missing[0], there)
        raise ValueError(f"{title}: {source} has no column {missing[0]!r}{hint}. Its columns are {quoted(there)}.")
    if len({*asked}) < len(asked):
        twice = next(each for each in asked if asked.count(each) > 1)
        raise ValueError(f"{title}: the column {twice!r} is to have two names: give it one.")
    left_out = [name for name in columns if name in there and name not in asked]
    if left_out:
        logger.warning(
            "%s: the columns %s of %s are left out, since others take their names", title, quoted(left_out), source
        )
        rows = rows.remove_columns(left_out)
    renamed = {each: name for name, each in columns.items() if each != name}
    return entitled(rows.rename_columns(renamed) if renamed else rows, source)


def with_columns_there(rows: Any, columns: Mapping[str, Any]) -> Any:
    """As `with_columns`, for rows to evaluate on: those that have none of these columns have others' names already."""
    return with_columns(rows, columns) if {*columns.values()} & {*column_names(rows)} else rows
