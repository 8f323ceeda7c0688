"""Completions of several turns: the rounds in which the model writes them, each with the context that it is given.

A prepared row has the tokens of a completion's rounds one behind the other, each without what it has in common with
the row's prompt. Beside them stand the labels, the length of each round, and how many of the prompt's tokens it goes on
from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, List, Value
from jaxtyping import Bool, Int

from lowtide.data.batches.token_rows import IGNORED, TokenRows
from lowtide.score_rules import IGNORE

LABELS, SEQ_LENGTHS, PREFIX_LENGTH = "labels", "seq_lengths", "prefix_length"


class CompletionRound(NamedTuple):
    """A part of a completion, which is written in one context."""

    token_ids: Sequence[int]
    """Without those of the prompt that it goes on from."""
    labels: Sequence[int]
    """The tokens, or -100 where one is not scored."""
    seen: int
    """So many of the prompt's first tokens stand before it."""

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        whole = self.labels is self.token_ids
        return len(self.token_ids) if whole else sum(label != IGNORE for label in self.labels)

    def placed(self, prompt: Sequence[int], shared: int) -> tuple[Sequence[int], tuple[int, int] | int]:
        """(what of the prompt is repeated before its tokens, what its segment goes on from, as of
        `RaggedBatch.from_segments`).

        Args:
            shared: the segment that the prompt is; -1 where it is repeated.
        """
        if shared < 0 or not self.seen:
            return prompt[: self.seen], -1
        return [], (shared, self.seen) if self.seen < len(prompt) else shared


def round_columns(completion: str) -> tuple[str, str, str]:
    """The columns of a completion's rounds: labels, lengths, and tokens of the prompt; null of a completion in one
    round that is scored whole.

    Args:
        completion: the column of its tokens.
    """
    name = completion.removesuffix("_ids")
    return f"{name}_{LABELS}", f"{name}_{SEQ_LENGTHS}", f"{name}_{PREFIX_LENGTH}"


def round_features(completions: Sequence[str]) -> dict[str, Any]:
    """The features of the columns of the rounds of completions."""
    return {name: List(Value("int32")) for each in completions for name in round_columns(each)}


def has_rounds(row: Mapping[str, Any]) -> bool:
    """Whether a completion of a prepared row has several rounds, or turns in one."""
    return any(row.get(round_columns(name)[0]) is not None for name in row if name.endswith("_ids"))


def context_tokens(rows: Any) -> int:
    """The tokens of completions of prepared rows that are not scored: the contexts of their later turns."""
    names = [round_columns(name)[0] for name in rows.column_names if name.endswith("_ids")]
    count = 0
    for name in {*names} & {*rows.column_names}:
        for part in rows.with_format("arrow").select_columns([name]).iter(batch_size=10_000):
            labels = part[name].combine_chunks()
            count += int((labels.flatten().to_numpy() == IGNORED).sum())
    return count


def without_empty(rows: Dataset) -> Dataset:
    """Prepared rows without the columns of rounds, where no completion of any row has several."""
    found = [round_columns(name) for name in rows.column_names if name.endswith("_ids")]
    found = [columns for columns in found if columns[0] in rows.column_names]
    if any(rows.data.column(labels).null_count < rows.data.num_rows for labels, *_ in found):
        return rows
    return rows.remove_columns([name for columns in found for name in columns])


def completion_rounds(row: Mapping[str, Any], completion: str) -> list[CompletionRound]:
    """The rounds of a completion of a prepared row."""
    tokens = row[completion]
    labels, lengths, seen = cast(Any, (row.get(name) for name in round_columns(completion)))
    if lengths is None:
        return [CompletionRound(tokens, tokens, len(row["prompt_ids"]))]
    bounds = pairwise(accumulate(lengths, initial=0))
    return [
        CompletionRound(tokens[start:stop], labels[start:stop], most)
        for (start, stop), most in zip(bounds, seen, strict=True)
    ]


def first_turns(side: TokenRows) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
    """The range of each row that is its completion; of one of several turns the first of these."""
    assert side.prompt_lengths is not None
    starts, stops = side.prompt_lengths.copy(), side.lengths.copy()
    for row, own in enumerate(side.rounds or ()):
        if own:
            first = side.offsets[row] + starts[row]
            scored = side.labels[first : first + own[0][1]] != IGNORED
            begin = int(scored.argmax())
            rest = ~scored[begin:]
            starts[row] += begin
            stops[row] = starts[row] + (int(rest.argmax()) if rest.any() else len(rest))
    return starts, stops


def rounds_of_sides(name: str, side: TokenRows, is_kept: Bool[np.ndarray, " rows"]) -> dict[str, pa.Array]:
    """The columns of the rounds of a side, whose tokens are in the column `name`; null where a row has none."""
    if side.rounds is None:
        return {}
    assert side.prompt_lengths is not None
    columns: list[list[Sequence[int] | None]] = [[], [], []]
    for row, (own, kept) in enumerate(zip(side.rounds, is_kept.tolist(), strict=True)):
        labels = side.labels[side.offsets[row] + side.prompt_lengths[row] : side.offsets[row + 1]] if own else None
        told = [labels, [length for _, length in own], [seen for seen, _ in own]] if own and kept else [None] * 3
        for column, value in zip(columns, told, strict=True):
            column.append(value)
    made = [pa.array(column, pa.list_(pa.int32())) for column in columns]
    return dict(zip(round_columns(name), made, strict=True))
