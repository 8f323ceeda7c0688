"""Preparing a dataset that is read as it comes (`datasets.IterableDataset`).

The rows go the same way as those of a dataset on disk, lazily. What needs the whole dataset is done over a buffer of
`STREAM_BUFFER` rows: shuffling, and packing, so that no bin reaches from one buffer into the next; at a few hundred
tokens a row that leaves the last of some hundreds of bins partly empty. There is no ledger, and rows that are dropped
are dropped in silence: the counts are known only once the stream has ended.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, IterableDataset

from lowtide.data.batches.packed import PACKED_FEATURES, RowReader, packed_tables
from lowtide.data.batches.packing import Strategy, pack
from lowtide.data.options import PrepareOptions
from lowtide.data.report.row_stats import TOKEN_FEATURES

STREAM_BUFFER = 10_000

Batch = Mapping[str, Sequence[Any]]


def map_stream(
    rows: IterableDataset, preparer: Callable[[Batch, Sequence[int]], pa.Table], features: Features
) -> IterableDataset:
    """The columns `features` of the rows that are kept; `preparer` makes noted rows of a batch."""
    return rows.map(
        partial(_prepare_batch, preparer=preparer, columns=list(features)),
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names or list(next(iter(rows))),
        features=features,
    )


def _prepare_batch(
    batch: Batch,
    numbers: Sequence[int],
    preparer: Callable[[Batch, Sequence[int]], pa.Table],
    columns: list[str],
) -> dict[str, list[Any]]:
    table = preparer(batch, numbers)
    kept = pa.array(table["dropped"].to_numpy() == 0)
    return table.filter(kept).select(columns).to_pydict()


def prepare_stream(
    rows: IterableDataset,
    preparer: Callable[[Batch, Sequence[int]], pa.Table],
    options: PrepareOptions,
    *,
    packing: bool,
) -> IterableDataset:
    """Prepare a stream of rows; `preparer` makes noted rows of a batch."""
    prepared = map_stream(rows, preparer, TOKEN_FEATURES)
    if options.shuffle:
        prepared = prepared.shuffle(seed=options.seed, buffer_size=STREAM_BUFFER)
    if not packing:
        return prepared
    packed = prepared.map(
        partial(_pack_buffer, capacity=options.max_length, strategy=options.packing_strategy),
        batched=True,
        batch_size=STREAM_BUFFER,
        remove_columns=list(TOKEN_FEATURES),
        features=PACKED_FEATURES,
    )
    return packed.shuffle(seed=options.seed) if options.shuffle else packed


def _pack_buffer(batch: Batch, capacity: int | None, strategy: Strategy) -> dict[str, list[Any]]:
    assert capacity is not None
    rows = pa.table({name: pa.array(batch[name], pa.list_(pa.int32())) for name in TOKEN_FEATURES})
    plan = pack(np.array([len(row) for row in batch["input_ids"]]), capacity, strategy)
    packed = pa.concat_tables(packed_tables(RowReader(rows), plan))
    scored = pa.array(packed["scored"].to_numpy() > 0)
    return packed.filter(scored).select(list(PACKED_FEATURES)).to_pydict()
