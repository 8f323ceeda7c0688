"""Preparing a dataset that is read as it comes (`datasets.IterableDataset`).

The rows go the same way as those of a dataset on disk, lazily. What needs the whole dataset is done over a buffer of
`STREAM_BUFFER` rows: shuffling, and packing, so that no bin reaches from one buffer into the next; at a few hundred
tokens a row that leaves the last of some hundreds of bins partly empty. There is no ledger: the
counts are known only once the stream has ended. Of rows that are dropped, or doubtful, the first are warned of.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, IterableDataset
from jaxtyping import Bool

from lowtide.data.batches.packed import RowReader, Units, packed_tables
from lowtide.data.batches.packing import pack
from lowtide.data.batches.token_rows import LENGTHS_FEATURE
from lowtide.data.options import PrepareOptions
from lowtide.data.report.doubts import DOUBT_NOTES, find_doubts, warn_of_doubts

logger = logging.getLogger(__name__)

STREAM_BUFFER = 10_000
DROPPED = "dropped"

Batch = Mapping[str, Sequence[Any]]


def map_stream(
    rows: IterableDataset, preparer: Callable[[Batch, Sequence[int]], pa.Table], features: Features, source: str
) -> IterableDataset:
    """The columns `features` of the rows that are kept; `preparer` makes noted rows of a batch of `source`."""
    return rows.map(
        _StreamPreparer(preparer, list(features), source),
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names or list(next(iter(rows))),
        features=features,
    )


@dataclass
class _StreamPreparer:
    """What `datasets` calls with each batch of a stream."""

    preparer: Callable[[Batch, Sequence[int]], pa.Table]
    columns: list[str]
    source: str
    said: set[Any] = field(default_factory=set)
    """What was warned of."""

    def __call__(self, batch: Batch, numbers: Sequence[int]) -> dict[str, list[Any]]:
        table = self.preparer(batch, numbers)
        is_kept = table["dropped"].to_numpy() == 0
        self._warn(table, is_kept, numbers)
        return table.filter(pa.array(is_kept)).select(self.columns).to_pydict()

    def _warn(self, table: pa.Table, is_kept: Bool[np.ndarray, " rows"], numbers: Sequence[int]) -> None:
        """Says once in a stream that rows are dropped, and each thing that is doubtful."""
        if not is_kept.all() and DROPPED not in self.said:
            self.said.add(DROPPED)
            logger.warning(
                "%s: %s of the rows %s to %s have nothing to train on and are left out; later ones are without a "
                "warning. Of a dataset that is no stream the ledger has the reasons.",
                self.source,
                len(is_kept) - np.count_nonzero(is_kept),
                numbers[0],
                numbers[-1],
            )
        if not set(DOUBT_NOTES) <= set(table.column_names):
            return
        found = {doubt: each for doubt, each in find_doubts(table, {}).items() if doubt not in self.said}
        self.said |= set(found)
        warn_of_doubts(f"{self.source} (a stream, so far)", found, int(np.count_nonzero(is_kept)))


def prepare_stream(
    rows: IterableDataset,
    preparer: Callable[[Batch, Sequence[int]], pa.Table],
    features: Features,
    options: PrepareOptions,
    *,
    packing: bool,
    source: str,
) -> IterableDataset:
    """Prepare a stream of rows; `preparer` makes noted rows of a batch, with the columns `features`."""
    prepared = map_stream(rows, preparer, features, source)
    if options.shuffle:
        prepared = prepared.shuffle(seed=options.seed, buffer_size=STREAM_BUFFER)
    if not packing:
        return prepared
    packed_features = Features({**features, **LENGTHS_FEATURE})
    packed = prepared.map(
        partial(_pack_buffer, options=options, features=packed_features),
        batched=True,
        batch_size=STREAM_BUFFER,
        remove_columns=list(features),
        features=packed_features,
    )
    return packed.shuffle(seed=options.seed) if options.shuffle else packed


def _pack_buffer(batch: Batch, options: PrepareOptions, features: Features) -> dict[str, list[Any]]:
    assert options.max_length is not None
    schema = pa.schema([field for field in features.arrow_schema if field.name in batch])
    rows = pa.table({name: batch[name] for name in schema.names}, schema=schema)
    units = Units.of_rows(np.array([len(row) for row in batch["input_ids"]]), None, rows)
    plan = pack(units.lengths, options.max_length, options.packing_strategy)
    packed = pa.concat_tables(packed_tables(RowReader(rows), plan, units, own_token=options.own_token))
    scored = pa.array(packed["scored"].to_numpy() > 0)
    return packed.filter(scored).select(list(features)).to_pydict()
