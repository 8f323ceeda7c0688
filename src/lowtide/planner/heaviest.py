"""Which rows of a dataset make the heaviest micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

STARTS = 256
"""Row lengths to begin with, in the search for rows that fill a budget."""


def row_lengths(dataset: Any, prompts: int = 1) -> np.ndarray | None:
    """[rows]: the tokens of each prepared row; None for streams and for data of other kinds.

    Args:
        prompts: how often a row's prompt is computed.
    """
    if not isinstance(dataset, Dataset):
        return None
    columns = [name for name in dataset.column_names if name.endswith("_ids") and name != "position_ids"]
    if not columns:
        return None
    table = dataset.with_format("arrow").select_columns(columns)
    found = []
    for part in table.iter(batch_size=10_000):
        lists: Any = part
        if not all(pa.types.is_list(field.type) or pa.types.is_large_list(field.type) for field in lists.schema):
            return None
        tokens = {name: lists[name].combine_chunks().value_lengths().to_numpy() for name in columns}
        found.append(sum(each * (prompts if name == "prompt_ids" else 1) for name, each in tokens.items()))
    return np.concatenate(found) if found else None


def rows_in_a_step(args: Any) -> int:
    """Of an optimizer step, on one rank."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps


def heaviest_rows(lengths: np.ndarray, most: int, budget: int | None) -> list[list[int]]:
    """The rows of the micro-batches that can take most: the longest rows together; and, where a budget cuts them off,
    the rows that fill it best.

    Args:
        lengths: [rows], tokens of each row.
        most: rows in a micro-batch.
        budget: tokens in a micro-batch.
    """
    by_length: dict[int, list[int]] = {}
    for row in np.argsort(-lengths, kind="stable")[: STARTS * most].tolist() if budget is None else range(len(lengths)):
        by_length.setdefault(int(lengths[row]), []).append(row)
    distinct = sorted(by_length, reverse=True)
    longest = _filled(distinct, by_length, most, budget)
    fullest = longest
    for start in range(1, min(len(distinct), STARTS) if budget is not None else 0):
        other = _filled(distinct[start:], by_length, most, budget)
        if lengths[other].sum() > lengths[fullest].sum():
            fullest = other
    return [longest] if fullest is longest else [longest, fullest]


def _filled(distinct: Sequence[int], by_length: dict[int, list[int]], most: int, budget: int | None) -> list[int]:
    """Rows taken longest first for as long as they go together."""
    chosen: list[int] = []
    room = budget
    for length in distinct:
        count = most - len(chosen)
        if room is not None:
            count = min(count, room // length)
        taken = by_length[length][:count]
        chosen += taken
        room = None if room is None else room - length * len(taken)
    return sorted(chosen)
