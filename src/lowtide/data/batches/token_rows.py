"""A few tokenized rows, token-major: one flat array of tokens, and where each row begins and ends.

This is what preparation computes with between the tokenizer and Arrow, so that cutting, masking and counting are
whole-array operations, and the arrays are handed to Arrow as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

IGNORED = -100
"""The label of a token that is not scored, as everywhere in Hugging Face's libraries."""


@dataclass(frozen=True)
class TokenRows:
    """Rows of token ids with their labels.

    A row's first label is never scored, whatever its value: no token comes before it to predict it.
    """

    token_ids: Int[np.ndarray, " tokens"]
    labels: Int[np.ndarray, " tokens"]
    offsets: Int[np.ndarray, " rows+1"]
    prompt_lengths: Int[np.ndarray, " rows"] | None = None
    """How many tokens of each row are its prompt; None for rows that have none."""
    merged: Bool[np.ndarray, " rows"] | None = None
    """Rows whose prompt, tokenized alone, is not how the row begins: tokens merge across its end."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return np.diff(self.offsets)

    def scored_counts(self) -> Int[np.ndarray, " rows"]:
        """How many tokens of each row are scored, the first of a row never being one."""
        return count_scored(self.labels, self.offsets)

    def cut(self, start: Int[np.ndarray, " rows"], stop: Int[np.ndarray, " rows"]) -> "TokenRows":
        """Keep the tokens `start:stop` of each row, counted within the row."""
        if np.array_equal(stop - start, self.lengths):
            return self
        index, offsets = range_index(self.offsets[:-1] + start, stop - start)
        prompts = self.prompt_lengths
        if prompts is not None:
            prompts = np.clip(prompts, start, stop) - start
        return TokenRows(self.token_ids[index], self.labels[index], offsets, prompts, self.merged)


def flatten(lists: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " rows+1"]]:
    """Lay lists of integers one after the other; gives the values (as 64-bit integers) and the rows' offsets."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(values) for values in lists], out=offsets[1:])
    return np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(offsets[-1])), offsets


def range_index(
    starts: Int[np.ndarray, " ranges"], lengths: Int[np.ndarray, " ranges"]
) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " ranges+1"]]:
    """The positions of ranges laid one after the other, and the offsets of the ranges in them."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets


def count_scored(
    labels: Int[np.ndarray, " tokens"], offsets: Int[np.ndarray, " segments+1"]
) -> Int[np.ndarray, " segments"]:
    """How many labels of each segment are scored; the first of a segment never is."""
    scored = labels != IGNORED
    starts = offsets[:-1]
    scored[starts[np.diff(offsets) > 0]] = False
    total = np.zeros(len(labels) + 1, dtype=np.int64)
    np.cumsum(scored, out=total[1:])
    return total[offsets[1:]] - total[starts]


def list_column(values: Int[np.ndarray, " tokens"], offsets: Int[np.ndarray, " rows+1"]) -> pa.ListArray:
    """An Arrow column of 32-bit lists over these values."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
