"""Which rows of a dataset make the heaviest micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from lowtide.data.batches.completion_rounds import round_columns
from lowtide.data.batches.shared_rounds import WholeRounds, tokens_before
from lowtide.data.batches.token_rows import PREFIX, PREFIX_LENGTH, SEGMENTS

STARTS = 256
"""Row lengths to begin with, in the search for rows that fill a budget."""


def row_lengths(dataset: Any, collator: Any = None, *, trained: bool = False) -> np.ndarray | None:
    """[rows]: the tokens of each prepared row; None for streams and for data of other kinds.

    Args:
        collator: makes batches of rows. It may say whether what segments share is computed once (`sharing`), which
            completions are only scored (`apart`), or what each prompt, or row, comes to with completions that have yet
            to be written (`lengths`, `row_lengths`).
        trained: count what goes backward alone.
    """
    if not isinstance(dataset, Dataset):
        return None
    own = collator.collator if isinstance(collator, WholeRounds) else collator
    if hasattr(own, "row_lengths"):
        return own.row_lengths(dataset)
    if PREFIX in dataset.column_names and not getattr(collator, "sharing", True):
        return of_segments(dataset, np.add)
    counted = _token_counts(dataset)
    if counted is None:
        return None
    if (lengths := getattr(collator, "lengths", None)) is not None:
        return lengths(counted["prompt_ids"])
    apart = getattr(collator, "apart", ()) if trained else ()
    counted = {name: each for name, each in counted.items() if name not in apart}
    shared = "prompt_ids" not in counted or getattr(collator, "sharing", True)
    return np.add.reduce([*counted.values()] if shared else _with_contexts(dataset, counted, np.add))


def longest_row(dataset: Any, lengths: np.ndarray | None = None) -> int:
    """The most positions that a row takes; 0 where nothing is known of them.

    Args:
        lengths: [rows], the positions that each row takes, where these are not read off the rows.
    """
    positions = _positions(dataset) if lengths is None and isinstance(dataset, Dataset) and len(dataset) else lengths
    return 0 if positions is None else int(positions.max())


def check_positions(
    dataset: Any,
    most: int,
    name: str,
    written: int = 0,
    lengths: np.ndarray | None = None,
    *,
    whose: str = "the model",
) -> None:
    """Refuses rows that a model has not the positions for; nothing is known of streams and data of other kinds.

    Args:
        most: the positions of the model.
        name: what messages call the dataset.
        written: tokens of the completions that a policy writes after the rows, which are prompts.
        lengths: [rows], the positions that each row takes, where these are not read off the rows.
        whose: what messages call the model.

    Raises:
        ValueError: names the longest such row.
    """
    positions = _positions(dataset) if lengths is None and isinstance(dataset, Dataset) and len(dataset) else lengths
    if positions is None:
        return
    longest = int(positions.argmax())
    if written and positions[longest] + written > most:
        raise ValueError(
            f"row {longest} of {name} has a prompt of {int(positions[longest]):,} tokens, which with "
            f"max_completion_length={written} goes past the {most:,} positions of {whose} (max_position_embeddings): "
            f"set max_prompt_length={max(most - written, 1)}, which keeps the end of prompts, or write less"
        )
    if positions[longest] > most:
        raise ValueError(
            f"row {longest} of {name} has {int(positions[longest]):,} tokens and {whose} {most:,} "
            f"positions (max_position_embeddings): set max_length={most}, or take a model with more"
        )


def _positions(dataset: Dataset) -> np.ndarray | None:
    """[rows]: the positions that each row takes, which begin anew in each packed segment and behind each prompt."""
    if SEGMENTS in dataset.column_names:
        return of_segments(dataset, np.maximum)
    counted = _token_counts(dataset)
    if counted is None:
        return None
    return np.maximum.reduce(_with_contexts(dataset, counted, np.maximum) or [*counted.values()])


def of_segments(dataset: Dataset, added_up: np.ufunc) -> np.ndarray:
    """[rows]: of the lengths of the segments of each row, each with what it goes on from."""
    columns = [name for name in (SEGMENTS, PREFIX, PREFIX_LENGTH) if name in dataset.column_names]
    found = []
    for part in dataset.with_format("arrow").select_columns(columns).iter(batch_size=10_000):
        lists: Any = {name: part[name].combine_chunks() for name in columns}  # type: ignore[index]
        flat = {name: each.flatten().to_numpy() for name, each in lists.items()}
        counts, lengths = lists[SEGMENTS].value_lengths().to_numpy(), flat[SEGMENTS]
        before = tokens_before(counts, lengths, flat.get(PREFIX), flat.get(PREFIX_LENGTH))
        found.append(added_up.reduceat(lengths + before, np.cumsum(counts) - counts))
    return np.concatenate(found)


def _with_contexts(dataset: Dataset, counted: Mapping[str, np.ndarray], added_up: np.ufunc) -> list[np.ndarray]:
    """For each completion of prompts [rows]: its tokens with those of the prompt, added up over its rounds where it has
    several; nothing of rows without prompts, or of prompts alone."""
    if "prompt_ids" not in counted:
        return []
    found = {name: each + counted["prompt_ids"] for name, each in counted.items() if name != "prompt_ids"}
    for name, whole in found.items():
        columns, first = list(round_columns(name)[1:]), 0
        table = dataset.with_format("arrow").select_columns(columns) if columns[0] in dataset.column_names else None
        for part in () if table is None else table.iter(batch_size=10_000):
            lists: Any = [part[column].combine_chunks() for column in columns]  # type: ignore[index]
            counts = lists[0].value_lengths().fill_null(0).to_numpy()
            rows = np.flatnonzero(counts)
            if len(rows):
                tokens = np.add.reduce([each.flatten().to_numpy() for each in lists])
                whole[first + rows] = added_up.reduceat(tokens, (np.cumsum(counts) - counts)[rows])
            first += len(counts)
    return [*found.values()]


def _token_counts(dataset: Dataset) -> dict[str, np.ndarray] | None:
    """By column of token ids, [rows]: how many there are in each row; None where there are no such columns."""
    names = dataset.column_names
    columns = ["input_ids"] if "input_ids" in names else [name for name in names if name.endswith("_ids")]
    columns = [name for name in columns if name != "position_ids"]
    found: dict[str, list[np.ndarray]] = {name: [] for name in columns}
    table = dataset.with_format("arrow").select_columns(columns)
    for part in table.iter(batch_size=10_000) if columns else ():
        lists: Any = part
        if not all(pa.types.is_list(field.type) or pa.types.is_large_list(field.type) for field in lists.schema):
            return None
        for name in columns:
            found[name].append(lists[name].combine_chunks().value_lengths().to_numpy())
    return {name: np.concatenate(each) for name, each in found.items()} if columns and len(dataset) else None


def rows_in_a_step(args: Any) -> int:
    """Of an optimizer step, on one rank."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps


def heaviest_rows(lengths: np.ndarray, most: int, budget: int | None) -> list[list[int]]:
    """The rows of the micro-batches that can take most: the longest rows together; and, where a budget cuts them off,
    the rows that fill it best. Where the longest row is above the budget, it is run in pieces, and comes first, alone.

    Args:
        lengths: [rows], tokens of each row.
        most: rows in a micro-batch.
        budget: tokens in a micro-batch.
    """
    if budget is not None and lengths.max() > budget:
        within = np.flatnonzero(lengths <= budget)
        others = heaviest_rows(lengths[within], most, budget) if len(within) else []
        return [[int(lengths.argmax())], *(within[rows].tolist() for rows in others)]
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


def heaviest_batch(lengths: np.ndarray, most: int, budget: int | None) -> list[int]:
    """Those of `heaviest_rows` that take most: the longest row where it is above the budget, else the fullest
    micro-batch."""
    found = heaviest_rows(lengths, most, budget)
    return found[0] if budget is not None and lengths.max() > budget else found[-1]


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
