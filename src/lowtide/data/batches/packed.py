"""Packed rows: the pieces that a packing plan puts together, written out one bin after the other.

A packed row's segments never see each other. The first token of each is given the label -100, so that no reader of
the row can score it against the segment before.
"""

import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.utils import are_progress_bars_disabled
from jaxtyping import Int
from rich.progress import track

from lowtide.data.batches.packing import Packing
from lowtide.data.batches.token_rows import IGNORED, count_scored, list_column, range_index
from lowtide.data.cache.mapped import release_pages
from lowtide.data.report.row_stats import TOKEN_FEATURES

BINS_AT_A_TIME = 1000
PIECES_AT_A_TIME = 500
"""After so many, the pages that they lie on are given back; the kernel maps some 100 kB around each."""
PACKED_FEATURES = Features({**TOKEN_FEATURES, "seq_lengths": List(Value("int32"))})


class RowReader:
    """Reads token ranges of rows in any order from the columns `input_ids` and `labels` of an Arrow table.

    Nothing is copied but what is asked for: the table's chunks are looked at where they lie, in the mapped `files`.
    """

    def __init__(self, table: pa.Table, files: tuple[str, ...] = ()) -> None:
        self.files = files
        batches = table.select(["input_ids", "labels"]).to_batches()
        self.first_rows = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.chunks = [tuple(_list_parts(column) for column in batch.columns) for batch in batches]

    def read(
        self,
        rows: Int[np.ndarray, " pieces"],
        starts: Int[np.ndarray, " pieces"],
        stops: Int[np.ndarray, " pieces"],
    ) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " tokens"]]:
        """Token ids and labels of the pieces, one after the other."""
        if len(rows) == 0:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        chunks = np.searchsorted(self.first_rows, rows, side="right") - 1
        token_ids, labels = [], []
        rows = rows - self.first_rows[chunks]
        places = zip(chunks.tolist(), rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
        while some := list(islice(places, PIECES_AT_A_TIME)):
            parts = [self._piece(*place) for place in some]
            token_ids.append(np.concatenate([ids for ids, _ in parts]))
            labels.append(np.concatenate([targets for _, targets in parts]))
            release_pages(self.files)
        return np.concatenate(token_ids), np.concatenate(labels)

    def _piece(
        self, chunk: int, row: int, start: int, stop: int
    ) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " tokens"]]:
        (token_ids, id_offsets), (labels, label_offsets) = self.chunks[chunk]
        first_id, first_label = id_offsets[row], label_offsets[row]
        return token_ids[first_id + start : first_id + stop], labels[first_label + start : first_label + stop]


def packed_tables(
    reader: RowReader, packing: Packing, numbers: Int[np.ndarray, " rows"] | None = None
) -> Iterator[pa.Table]:
    """The packed rows of a plan as Arrow tables, some bins at a time.

    Row `i` of the plan is row `numbers[i]` of the reader, or row `i` if there are no numbers.
    """
    for first in range(0, packing.bins, BINS_AT_A_TIME):
        bins = packing.bin_offsets[first : first + BINS_AT_A_TIME + 1]
        pieces = slice(bins[0], bins[-1])
        lengths = packing.stop[pieces] - packing.start[pieces]
        rows = packing.row[pieces] if numbers is None else numbers[packing.row[pieces]]
        token_ids, labels = reader.read(rows, packing.start[pieces], packing.stop[pieces])
        _, segments = range_index(np.zeros_like(lengths), lengths)
        labels = labels.copy()
        labels[segments[:-1]] = IGNORED
        bins = bins - bins[0]
        yield pa.table(
            {
                "input_ids": list_column(token_ids, segments[bins]),
                "labels": list_column(labels, segments[bins]),
                "seq_lengths": list_column(lengths, bins),
                "scored": pa.array(count_scored(labels, segments[bins]), pa.int32()),
            }
        )


def write_packed(
    reader: RowReader, packing: Packing, numbers: Int[np.ndarray, " rows"] | None, path: str, name: str
) -> None:
    """Write the packed rows of a plan to an Arrow file, which is there as a whole or not at all."""
    tables = packed_tables(reader, packing, numbers)
    unfinished = Path(f"{path}.{uuid.uuid4().hex}.tmp")
    try:
        with pa.OSFile(str(unfinished), "wb") as sink:
            writer = None
            for table in track(
                tables,
                description=f"Packing {name}",
                total=-(-packing.bins // BINS_AT_A_TIME),
                transient=True,
                disable=are_progress_bars_disabled(),
            ):
                writer = writer or pa.ipc.new_stream(sink, table.schema)
                writer.write_table(table)
            assert writer is not None, "a plan without bins"
            writer.close()
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def drop_unscored(packed: Dataset) -> tuple[Dataset, int, int]:
    """Leave out packed rows without a scored token; gives the rest, how many these were, and their tokens."""
    scored = packed.data.column("scored").to_numpy()
    if scored.all():
        return packed, 0, 0
    batches = packed.data.table.to_batches()
    lengths = np.concatenate([np.diff(batch.column("input_ids").offsets.to_numpy()) for batch in batches])
    empty = scored == 0
    return packed.select(np.flatnonzero(~empty)), int(empty.sum()), int(lengths[empty].sum())


def _list_parts(column: pa.ListArray) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " rows+1"]]:
    """The values of a list column, and where its rows begin and end in them."""
    return column.values.to_numpy(), column.offsets.to_numpy()
