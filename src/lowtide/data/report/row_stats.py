"""What preparation notes down beside every row, and what it adds up to.

The notes are columns of the cached dataset, so that the ledger of a start that finds its dataset in the cache is
the ledger of the start that made it. They are read a chunk at a time from the memory-mapped file; what stays is the
length of each row that is trained on, and, if there are others, its number: four bytes a row each.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from datasets import Dataset, Value
from jaxtyping import Bool, Int

from lowtide.data.batches.shared_rounds import Sharing, share_rounds
from lowtide.data.batches.token_rows import (
    PREFIX,
    PREFIX_LENGTH,
    SEGMENTS,
    TokenRows,
    list_column,
    optional_columns,
)
from lowtide.data.cache.mapped import mapped_files, release_pages
from lowtide.data.report.doubts import DOUBT_NOTES, Found, doubt_column, find_doubts
from lowtide.data.report.ledger import Ledger

logger = logging.getLogger(__name__)

CUT_AWAY = "no scored token left after truncation"
DROP_REASONS = ("kept", "no tokens", "no scored token", CUT_AWAY)
"""Why a row is not trained on; the index is what is noted down."""

NOTES = {"scored": Value("int32"), "cut": Value("int32"), "dropped": Value("int8"), "merged": Value("bool")}
CUT_PART = "cut_"
"""How the columns begin that note `cut` for each part of a row that has several."""


@dataclass(frozen=True)
class Statistics:
    """The notes on all rows of a prepared dataset, added up."""

    part_lengths: Int[np.ndarray, "parts kept"]
    """The tokens of each row that is trained on, in each of its columns of tokens."""
    numbers: Int[np.ndarray, " kept"] | None
    """The numbers of these rows; None if they are all."""
    scored: int
    tokens_cut: int
    rows_cut: int
    rows_dropped: dict[str, int]
    tokens_dropped: int
    merged: int
    """Rows whose prompt and completion merge tokens where they meet."""
    doubts: Found
    """What is doubtful in rows that are trained on."""
    cut_by_part: dict[str, int] | None = None
    """`tokens_cut` by the part of the row that lost them; None for rows of one part."""
    shared: int = 0
    """Tokens that rounds of conversations have from others."""

    @property
    def kept(self) -> int:
        """How many rows are trained on."""
        return self.part_lengths.shape[1]

    @property
    def lengths(self) -> Int[np.ndarray, " kept"]:
        """The tokens of each row that is trained on."""
        return self.part_lengths.sum(axis=0, dtype=np.int32)

    def ledger(self, *, name: str, batch_size: int, padding_avoided: float, read_as: str) -> Ledger:
        """The ledger of these rows."""
        lengths = self.lengths
        return Ledger(
            name=name,
            rows=self.kept,
            tokens=int(lengths.sum(dtype=np.int64)),
            scored_tokens=self.scored,
            tokens_cut=self.tokens_cut,
            rows_cut=self.rows_cut,
            rows_dropped=self.rows_dropped,
            tokens_dropped=self.tokens_dropped,
            longest_row=int(lengths.max()),
            batch_size=batch_size,
            padding_avoided=padding_avoided,
            cut_by_part=self.cut_by_part,
            tokens_shared=self.shared or None,
            read_as=read_as,
        )


def warn_of_dropped(source: str, statistics: Statistics) -> None:
    """Says which rows of a dataset are not trained on, if there are some."""
    if statistics.rows_dropped:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in statistics.rows_dropped.items())
        dropped = sum(statistics.rows_dropped.values())
        rows = f"{dropped:,} of {dropped + statistics.kept:,} rows"
        logger.warning("%s: %s are not trained on (%s).", source, rows, reasons)


def noted_table(whole: TokenRows, kept: TokenRows, sharing: Sharing | None = None) -> pa.Table:
    """Rows with their notes, from the rows as they were and as truncation leaves them.

    Of several rows that belong to one of the dataset, those without a scored token left are left out.

    Args:
        sharing: how the others are laid.
    """
    groups = np.arange(len(whole) + 1) if whole.groups is None else whole.groups
    scored = kept.scored_counts()
    rest = kept.cut(np.zeros_like(kept.lengths), np.where(scored > 0, kept.lengths, 0))
    lengths, left, scored_before, scored = (
        _sums(each, groups) for each in (whole.lengths, rest.lengths, whole.scored_counts(), scored)
    )
    dropped = np.select([lengths == 0, scored_before == 0, scored == 0], [1, 2, 3], default=0)
    merged = np.zeros(len(groups) - 1, dtype=bool) if whole.merged is None else _sums(whole.merged, groups) > 0
    joined, segments = (rest, {}) if rest.groups is None else _joined(rest, sharing)
    return pa.table(
        {
            "input_ids": list_column(joined.token_ids, joined.offsets),
            "labels": list_column(joined.labels, joined.offsets),
            **segments,
            **optional_columns(joined),
            "scored": pa.array(scored, pa.int32()),
            "cut": pa.array(lengths - left, pa.int32()),
            "dropped": pa.array(dropped, pa.int8()),
            "merged": pa.array(merged & (dropped == 0), pa.bool_()),
            "doubts": doubt_column([whole]),
        }
    )


def _joined(rows: TokenRows, sharing: Sharing | None) -> tuple[TokenRows, dict[str, pa.ListArray]]:
    """Each group as one row, and the columns that tell its segments."""
    laid, prefix, seen = share_rounds(rows, sharing)
    assert laid.groups is not None
    values = {SEGMENTS: laid.lengths}
    if sharing is not None:
        values |= {PREFIX: prefix, PREFIX_LENGTH: seen}
    columns = {name: list_column(each, laid.groups) for name, each in values.items()}
    return replace(laid, offsets=laid.offsets[laid.groups]), columns


def _sums(values: np.ndarray, groups: Int[np.ndarray, " groups+1"]) -> Int[np.ndarray, " groups"]:
    """The sum of the values of each group."""
    total = np.append(0, np.cumsum(values, dtype=np.int64))
    return total[groups[1:]] - total[groups[:-1]]


def add_up(
    prepared: Dataset, parts: Sequence[str] = ("input_ids",), reasons: Sequence[str] = DROP_REASONS
) -> Statistics:
    """Add up the notes of a prepared dataset, whose tokens are in the columns `parts`."""
    table, files = prepared.data.table, mapped_files(prepared)
    lengths = np.empty((len(parts), table.num_rows), dtype=np.int32)
    numbers = np.empty(table.num_rows, dtype=np.int32)
    cut_parts = [column for column in table.column_names if column.startswith(CUT_PART)]
    count = 0
    sums: Counter[str] = Counter()
    dropped = np.zeros(len(reasons), dtype=np.int64)
    first = 0
    found: Found = {}
    for batch in table.to_batches():
        notes = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in (*NOTES, *cut_parts)}
        is_kept: Bool[np.ndarray, " rows"] = notes["dropped"] == 0
        sums["rows_cut"] += int(np.count_nonzero(notes["cut"][is_kept]))
        sums["dropped"] += int(notes["cut"][~is_kept].sum(dtype=np.int64))
        sums["merged"] += int(np.count_nonzero(notes["merged"]))
        for name in ("scored", "cut", *cut_parts):
            sums[name] += int(notes[name][is_kept].sum(dtype=np.int64))
        dropped += np.bincount(notes["dropped"], minlength=len(dropped))
        if set(DOUBT_NOTES) <= set(table.column_names):
            found = find_doubts(batch, found)
        here = np.flatnonzero(is_kept)
        for index, part in enumerate(parts):
            lengths[index, count : count + len(here)] = np.diff(batch.column(part).offsets.to_numpy())[here]
        if PREFIX_LENGTH in table.column_names:
            sums["shared"] += int(batch.column(PREFIX_LENGTH).flatten().to_numpy().clip(0).sum(dtype=np.int64))
        numbers[count : count + len(here)] = first + here
        count += len(here)
        first += batch.num_rows
        release_pages(files)
    return Statistics(
        part_lengths=lengths[:, :count],
        numbers=numbers[:count] if count < first else None,
        scored=sums["scored"],
        tokens_cut=sums["cut"],
        rows_cut=sums["rows_cut"],
        rows_dropped={reason: int(count) for reason, count in zip(reasons[1:], dropped[1:], strict=True) if count},
        tokens_dropped=sums["dropped"],
        merged=sums["merged"],
        doubts=found,
        cut_by_part={column.removeprefix(CUT_PART): sums[column] for column in cut_parts} or None,
        shared=sums["shared"],
    )
