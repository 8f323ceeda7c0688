"""Whole datasets: mixtures, pairs taken apart, rows cut or packed. Each gives what TRL's function of its name gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from pyarrow import compute

from lowtide.compat.datasets import stream_format
from lowtide.data.batches.packing import Packing, pack
from lowtide.data.sources.mixtures import load_mixture
from lowtide.scripts.arguments import DatasetMixtureConfig

D = TypeVar("D", Dataset, DatasetDict, IterableDataset, IterableDatasetDict)
lists: Any = compute
SEGMENTS = "seq_lengths"
"""The column that says how long each of a packed row's segments is."""


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """The datasets of a mixture as one, with the split `train`, and `test` where `test_split_size` asks for it.

    Raises:
        ValueError: an entry of `datasets` that cannot be used.
    """
    return load_mixture(
        mixture_config.datasets,
        streaming=mixture_config.streaming,
        test_split_size=mixture_config.test_split_size,
    )


def unpair_preference_dataset(dataset: D, **map_kwargs: Any) -> D:
    """Pairs as single completions: `completion` and `label`, the chosen ones true; other columns are repeated.

    Args:
        dataset: with `chosen` and `rejected`.
        map_kwargs: of `Dataset.map`, such as `num_proc` and `desc`. A batch's chosen ones come first.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=_columns(dataset), **map_kwargs)  # type: ignore[return-value]


def maybe_unpair_preference_dataset(dataset: D, num_proc: int | None = None, desc: str | None = None) -> D:
    """`unpair_preference_dataset` where there are pairs; other datasets as they are."""
    if not {"chosen", "rejected"} <= set(_columns(dataset)):
        return dataset
    given = {"num_proc": num_proc, "desc": desc}
    return unpair_preference_dataset(dataset, **{name: value for name, value in given.items() if value is not None})


def truncate_dataset(dataset: D, max_length: int, map_kwargs: dict[str, Any] | None = None) -> D:
    """The dataset with the first `max_length` values of each column of lists."""
    return _mapped(dataset, partial(_cut, max_length=max_length), map_kwargs)


def _cut(table: pa.Table, max_length: int) -> pa.Table:
    columns = [lists.list_slice(c, 0, max_length) if _is_list(c.type) else c for c in table.columns]
    return pa.table(columns, names=table.column_names)


def pack_dataset(dataset: D, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None) -> D:
    """Rows of token ids put together into rows of at most `seq_length`.

    `SFTTrainer` with `packing=True` packs by itself, over the whole dataset; here, as in TRL, each of `Dataset.map`'s
    batches (1,000 rows) is packed by itself.

    Args:
        dataset: its columns are all lists, in each row of one length.
        strategy: `bfd` cuts rows at `seq_length`, `bfd_split` keeps what is cut off as further segments; both add the
            column `seq_lengths`. `wrapped` lays rows end to end.

    Raises:
        ValueError: an unknown strategy, or columns of different lengths.
        TypeError: a column that is not of lists.
    """
    if strategy not in ("bfd", "bfd_split", "wrapped"):
        raise ValueError(f"packing strategy {strategy!r} is not one of bfd, bfd_split, wrapped")
    added = () if strategy == "wrapped" else (SEGMENTS,)
    return _mapped(dataset, partial(_packed, capacity=seq_length, strategy=strategy), map_kwargs, added)


def _packed(table: pa.Table, capacity: int, strategy: Any) -> pa.Table:
    columns = {name: _chunk(table[name]) for name in table.column_names}
    offsets = _common_offsets(columns)
    plan = pack(np.diff(offsets), capacity, strategy)
    taken = _tokens_of(plan, offsets)
    ends = np.concatenate([[0], np.cumsum(plan.stop - plan.start)])
    made = {
        name: pa.ListArray.from_arrays(pa.array(ends[plan.bin_offsets], pa.int32()), column.flatten().take(taken))
        for name, column in columns.items()
    }
    if strategy != "wrapped":
        lengths = pa.array(plan.stop - plan.start, pa.int32())
        made[SEGMENTS] = pa.ListArray.from_arrays(pa.array(plan.bin_offsets, pa.int32()), lengths)
    return pa.table(made)


def _tokens_of(plan: Packing, offsets: np.ndarray) -> pa.Array:
    """[tokens]: where each token of the bins stands in the flattened columns."""
    lengths = plan.stop - plan.start
    first = offsets[plan.row] + plan.start - np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return pa.array(np.repeat(first, lengths) + np.arange(lengths.sum()))


def _common_offsets(columns: Mapping[str, pa.Array]) -> np.ndarray:
    """[rows + 1]: where each row's values begin and end, in every column alike."""
    found: np.ndarray | None = None
    for name, column in columns.items():
        if not _is_list(column.type):
            raise TypeError(f"packing needs columns of lists, and {name!r} is of {column.type}: leave it out first")
        offsets = np.concatenate([[0], np.cumsum(lists.list_value_length(column).to_numpy(zero_copy_only=False))])
        if found is not None and not np.array_equal(found, offsets):
            raise ValueError(f"packing needs columns of one length in each row, and {name!r} has another")
        found = offsets
    assert found is not None, "a table has columns"
    return found


def _mapped(
    dataset: D,
    change: Callable[[pa.Table], pa.Table],
    map_kwargs: Mapping[str, Any] | None,
    added: tuple[str, ...] = (),
) -> D:
    """The dataset with its tables changed, in the format that it had, columns that are new shown with the others.

    Args:
        change: a function of a module, or a `partial` of one: `datasets` hashes a lambda with the code of everything
            that it can reach, which takes seconds.
    """
    first: Any = next(iter(dataset.values())) if isinstance(dataset, DatasetDict | IterableDatasetDict) else dataset
    if isinstance(first, Dataset):
        shown = dict(first.format)
        shown |= shown.pop("format_kwargs", {})
        shown["columns"] = [*shown["columns"], *added]
    else:
        shown = {"type": stream_format(first)}
    changed: Any = dataset.with_format("arrow").map(change, batched=True, **(map_kwargs or {}))  # type: ignore[arg-type]
    return changed.with_format(**shown)


def _unpaired(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    rows = len(batch["chosen"])
    others = {name: [*values, *values] for name, values in batch.items() if name not in ("chosen", "rejected")}
    return {
        **others,
        "completion": [*batch["chosen"], *batch["rejected"]],
        "label": [True] * rows + [False] * rows,
    }


def _columns(dataset: Any) -> list[str]:
    first = next(iter(dataset.values())) if isinstance(dataset, DatasetDict | IterableDatasetDict) else dataset
    return first.column_names or list(next(iter(first)))


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
