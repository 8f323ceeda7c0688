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

from lowtide.data.batches.packed import LENGTHS_FEATURE, RowReader, packed_tables
from lowtide.data.batches.packing import pack
from lowtide.data.options import PrepareOptions

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
    features: Features,
    options: PrepareOptions,
    *,
    packing: bool,
) -> IterableDataset:
    """Prepare a stream of rows; `preparer` makes noted rows of a batch, with the columns `features`."""
    prepared = map_stream(rows, preparer, features)
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
    plan = pack(np.array([len(row) for row in batch["input_ids"]]), options.max_length, options.packing_strategy)
    packed = pa.concat_tables(packed_tables(RowReader(rows), plan, own_token=options.own_token))
    scored = pa.array(packed["scored"].to_numpy() > 0)
    return packed.filter(scored).select(list(features)).to_pydict()
