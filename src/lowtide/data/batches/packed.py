"""Packed rows: the pieces that a packing plan puts together, written out one bin after the other.

A packed row's segments never see each other. Where labels are predicted at the token before, the first token of each is
given the label -100, so that no reader of the row can score it against the segment before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled
from jaxtyping import Int, Num
from rich.progress import track

from lowtide.data.batches.packing import Packing
from lowtide.data.batches.token_rows import (
    IGNORED,
    PREFIX,
    PREFIX_LENGTH,
    SEGMENTS,
    WEIGHTS,
    count_scored,
    list_column,
    range_index,
    weights_column,
)
from lowtide.data.cache.mapped import release_pages
from lowtide.own_files import writing

BINS_AT_A_TIME = 1000
PIECES_AT_A_TIME = 500
"""After so many, the pages that they lie on are given back; the kernel maps some 100 kB around each."""


class RowReader:
    """Reads token ranges of rows in any order from the columns of tokens of an Arrow table: `input_ids`, `labels`, and
    `words` and `loss_weights` where they are there.

    Nothing is copied but what is asked for: the table's chunks are looked at where they lie, in the mapped `files`.
    """

    def __init__(self, table: pa.Table, files: tuple[str, ...] = ()) -> None:
        self.files = files
        self.columns = [name for name in ("input_ids", "labels", "words", WEIGHTS) if name in table.column_names]
        self.numbers = table.column("number").to_numpy() if "number" in table.column_names else None
        """By which what is drawn of a row is told from other rows'; None where nothing is drawn."""
        batches = table.select(self.columns).to_batches()
        self.first_rows = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.chunks = [tuple(_list_parts(column) for column in batch.columns) for batch in batches]

    def read(
        self,
        rows: Int[np.ndarray, " pieces"],
        starts: Int[np.ndarray, " pieces"],
        stops: Int[np.ndarray, " pieces"],
    ) -> dict[str, Num[np.ndarray, " tokens"]]:
        """The columns of the pieces, one after the other."""
        if len(rows) == 0:
            return {name: np.empty(0, np.int32) for name in self.columns}
        chunks = np.searchsorted(self.first_rows, rows, side="right") - 1
        found: list[list[np.ndarray]] = [[] for _ in self.columns]
        rows = rows - self.first_rows[chunks]
        places = zip(chunks.tolist(), rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
        while some := list(islice(places, PIECES_AT_A_TIME)):
            parts = [self._piece(*place) for place in some]
            for column, pieces in zip(found, zip(*parts, strict=True), strict=True):
                column.append(np.concatenate(pieces))
            release_pages(self.files)
        return {name: np.concatenate(column) for name, column in zip(self.columns, found, strict=True)}

    def _piece(self, chunk: int, row: int, start: int, stop: int) -> list[Num[np.ndarray, " tokens"]]:
        """Of each column, where it lies."""
        found = []
        for values, offsets in self.chunks[chunk]:
            piece = values[offsets[row] + start : offsets[row + 1]][: stop - start]
            found.append(piece if len(piece) else np.ones(stop - start, values.dtype))  # weights that are not there
        return found


@dataclass(frozen=True)
class Units:
    """What is packed, and stays together: rows of a reader, or the segments that they have, each with those that go on
    from it."""

    lengths: Int[np.ndarray, " units"]
    rows: Int[np.ndarray, " units"]
    """The row that each is of."""
    starts: Int[np.ndarray, " units"]
    """Where it begins there."""
    segments: "Segments | None" = None
    """Those of each unit; None where each is one."""

    @classmethod
    def of_rows(
        cls,
        lengths: Int[np.ndarray, " rows"],
        numbers: Int[np.ndarray, " rows"] | None,
        table: pa.Table,
    ) -> "Units":
        """The units of rows with these lengths and numbers; all rows if there are no numbers.

        Args:
            table: the reader's, with the lengths of the segments of each row where rows have several, and with what
                these go on from.
        """
        numbers = np.arange(len(lengths)) if numbers is None else numbers
        if SEGMENTS not in table.column_names:
            return cls(lengths, numbers, np.zeros_like(numbers))
        lists: Any = table.column(SEGMENTS).combine_chunks()
        counts = lists.value_lengths().to_numpy()
        ends = np.append(0, np.cumsum(counts, dtype=np.int64))
        index, bounds = range_index(ends[numbers], counts[numbers])
        own = lists.flatten().to_numpy()[index]
        before = np.append(0, np.cumsum(own, dtype=np.int64))[:-1]
        starts = before - np.repeat(before[np.minimum(bounds[:-1], len(own) - 1)], counts[numbers])
        of_row = np.repeat(numbers, counts[numbers])
        if PREFIX_LENGTH not in table.column_names:
            return cls(own, of_row, starts)
        seen = table.column(PREFIX_LENGTH).combine_chunks().flatten().to_numpy()[index]  # type: ignore[attr-defined]
        firsts = np.flatnonzero(seen < 0)
        segments = Segments(own, seen, np.append(firsts, len(own)))
        return cls(np.add.reduceat(own, firsts), of_row[firsts], starts[firsts], segments)


@dataclass(frozen=True)
class Segments:
    """The segments of units, one unit after the other; those behind a unit's first go on from it."""

    lengths: Int[np.ndarray, " segments"]
    seen: Int[np.ndarray, " segments"]
    """From how many tokens of the unit's first; -1 of that."""
    bounds: Int[np.ndarray, " units+1"]
    """Where the segments of each unit begin."""

    def columns(self, units: Int[np.ndarray, " pieces"], bins: Int[np.ndarray, " bins+1"]) -> dict[str, pa.ListArray]:
        """The columns that tell the segments of bins, from the units in them and where each begins among these."""
        counts = np.diff(self.bounds)[units]
        index, first = range_index(self.bounds[units], counts)
        seen, of_bins = self.seen[index], first[bins]
        before = np.repeat(first[:-1], counts) - np.repeat(of_bins[:-1], np.diff(of_bins))
        columns = {SEGMENTS: self.lengths[index], PREFIX: np.where(seen < 0, -1, before), PREFIX_LENGTH: seen}
        return {name: list_column(values, of_bins) for name, values in columns.items()}


def packed_tables(reader: RowReader, packing: Packing, units: Units, *, own_token: bool = False) -> Iterator[pa.Table]:
    """The packed rows of a plan as Arrow tables, some bins at a time.

    Row `i` of the plan is unit `i`. `own_token`: labels are predicted at their own tokens.
    """
    for first in range(0, packing.bins, BINS_AT_A_TIME):
        bins = packing.bin_offsets[first : first + BINS_AT_A_TIME + 1]
        pieces = slice(bins[0], bins[-1])
        lengths = packing.stop[pieces] - packing.start[pieces]
        rows, before = (each[packing.row[pieces]] for each in (units.rows, units.starts))
        starts, stops = before + packing.start[pieces], before + packing.stop[pieces]
        read = reader.read(rows, starts, stops)
        _, segments = range_index(np.zeros_like(lengths), lengths)
        if not own_token:
            read["labels"] = read["labels"].copy()
            read["labels"][segments[:-1]] = IGNORED
        bins = bins - bins[0]
        scored = count_scored(read["labels"], segments[bins], own_token=own_token)
        columns = {
            name: (weights_column if name == WEIGHTS else list_column)(values, segments[bins])
            for name, values in read.items()
        }
        if reader.numbers is not None:
            columns["number"] = pa.array(_of_bins(reader.numbers[rows], starts, bins), pa.int64())
        columns[SEGMENTS] = list_column(lengths, bins)
        if units.segments is not None:  # each piece is a whole unit
            columns |= units.segments.columns(packing.row[pieces], bins)
        yield pa.table({**columns, "scored": pa.array(scored, pa.int32())})


def _of_bins(
    numbers: Int[np.ndarray, " pieces"], starts: Int[np.ndarray, " pieces"], bins: Int[np.ndarray, " bins+1"]
) -> Int[np.ndarray, " bins"]:
    """A number for each bin, other than all others': that of its first piece, by its row and its place there."""
    first = bins[:-1]
    return np.where(numbers[first] < 0, -1, (numbers[first].astype(np.int64) << 32) + starts[first])


def write_packed(tables: Iterator[pa.Table], bins: int, path: str, name: str) -> None:
    """Write packed rows to an Arrow file, which is there as a whole or not at all."""
    with writing(Path(path)) as unfinished, pa.OSFile(str(unfinished), "wb") as sink:
        writer = None
        for table in track(
            tables,
            description=f"Packing {name}",
            total=-(-bins // BINS_AT_A_TIME),
            transient=True,
            disable=are_progress_bars_disabled(),
        ):
            writer = writer or pa.ipc.new_stream(sink, table.schema)
            writer.write_table(table)
        assert writer is not None, "a plan without bins"
        writer.close()


def drop_unscored(packed: Dataset) -> tuple[Dataset, int, int]:
    """Leave out packed rows without a scored token; gives the rest, how many these were, and their tokens."""
    scored = packed.data.column("scored").to_numpy()
    if scored.all():
        return packed, 0, 0
    batches = packed.data.table.to_batches()
    lengths = np.concatenate([np.diff(batch.column("input_ids").offsets.to_numpy()) for batch in batches])
    empty = scored == 0
    return packed.select(np.flatnonzero(~empty)), int(empty.sum()), int(lengths[empty].sum())


def _list_parts(column: pa.ListArray) -> tuple[Num[np.ndarray, " tokens"], Int[np.ndarray, " rows+1"]]:
    """The values of a list column, and where its rows begin and end in them."""
    return column.values.to_numpy(), column.offsets.to_numpy()
