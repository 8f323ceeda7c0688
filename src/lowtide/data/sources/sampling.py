"""Rows that stand for a dataset where only lengths are asked for: preparing them all takes a planner seconds.

Half of a sample are the rows with the most text, among which the longest in tokens are. The others lie evenly among the
remaining rows in the order of their text, so that rows of all lengths are there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from jaxtyping import Int

TEXT_BYTES = 16
"""That each piece of text counts beside its own: a message brings tokens of its template."""
ROWS_AT_A_TIME = 10_000


@dataclass
class Sample:
    """What was taken of a dataset."""

    most: int
    """Rows to take."""
    rows: int = 0
    """Of the dataset."""
    taken: int = 0
    """0 where all rows were prepared, or their preparation was there already."""

    def __str__(self) -> str:
        longest = self.taken // 2
        return (
            f"lengths are those of {self.taken:,} of the {self.rows:,} rows: the {longest:,} with the most text, and "
            f"{self.taken - longest:,} evenly among the others"
        )


_sample: ContextVar[Sample | None] = ContextVar("sample", default=None)


@contextmanager
def sampling(most: int) -> Iterator[Sample]:
    """While it lasts, of larger datasets only so many rows are prepared, unless all are in the cache already."""
    before = _sample.set(Sample(most))
    try:
        sample = _sample.get()
        assert sample is not None
        yield sample
    finally:
        _sample.reset(before)


def sampled_rows(rows: Dataset) -> Int[np.ndarray, " sample"] | None:
    """The numbers of the rows to prepare, ascending; None for all."""
    sample = _sample.get()
    if sample is None or len(rows) <= sample.most:
        return None
    sizes = np.concatenate([_text_bytes(part) for part in rows.with_format("arrow").iter(batch_size=ROWS_AT_A_TIME)])
    order = np.argsort(sizes, kind="stable")
    longest = sample.most // 2
    evenly = np.linspace(0, len(order) - longest - 1, sample.most - longest).round().astype(np.int64)
    chosen = np.unique(np.concatenate([order[evenly], order[len(order) - longest :]]))
    sample.rows, sample.taken = len(rows), len(chosen)
    return chosen


def _text_bytes(table: Any) -> Int[np.ndarray, " rows"]:
    """The bytes of all text of each row; of numbers, how many there are in lists."""
    return sum(
        (_bytes_of(column.combine_chunks()) for column in table.columns), start=np.zeros(table.num_rows, np.int64)
    )


def _bytes_of(values: pa.Array, inside: bool = False) -> Int[np.ndarray, " values"]:
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.call_function("binary_length", [values])
        return pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64) + TEXT_BYTES
    if pa.types.is_struct(kind):
        return sum((_bytes_of(field, inside) for field in values.flatten()), start=np.zeros(len(values), np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = np.concatenate([[0], np.cumsum(_bytes_of(values.values, inside=True))])
        offsets = values.offsets.to_numpy()
        return ends[offsets[1:]] - ends[offsets[:-1]]
    return np.full(len(values), int(inside), np.int64)
