"""A few tokenized rows, token-major: one flat array of tokens, and where each row begins and ends.

This is what preparation computes with between the tokenizer and Arrow, so that cutting, masking and counting are
whole-array operations, and the arrays are handed to Arrow as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value
from jaxtyping import Bool, Float, Int

TOKEN_FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
"""The columns of token rows."""
SEGMENTS = "seq_lengths"
LENGTHS_FEATURE = Features({SEGMENTS: List(Value("int32"))})
"""What rows of several segments have beside these columns: packed ones, and conversations in several rounds."""
PREFIX, PREFIX_LENGTH = "prefix", "prefix_length"
PREFIX_FEATURES = Features({PREFIX: List(Value("int32")), PREFIX_LENGTH: List(Value("int32"))})
"""What they have where segments go on from the beginning of others, as of `RaggedBatch.from_rows`."""
WEIGHTS = "loss_weights"
WEIGHTS_FEATURE = Features({WEIGHTS: List(Value("float32"))})
"""What rows have in which the weight of a message is between 0 and 1: that of each token in the loss. It is null in
rows without such a message."""
IGNORED = -100
"""The label of a token that is not scored, as everywhere in Hugging Face's libraries."""


Rounds = Sequence[tuple[int, int]]
"""Of each round of a completion (see `completion_rounds`) how many tokens of the prompt it goes on from, and how many
tokens it has behind them."""


@dataclass(frozen=True)
class TokenRows:
    """Rows of token ids with their labels."""

    token_ids: Int[np.ndarray, " tokens"]
    labels: Int[np.ndarray, " tokens"]
    offsets: Int[np.ndarray, " rows+1"]
    prompt_lengths: Int[np.ndarray, " rows"] | None = None
    """How many tokens of each row are its prompt; None for rows that have none."""
    merged: Bool[np.ndarray, " rows"] | None = None
    """Rows whose prompt, tokenized alone, is not how the row begins: tokens merge across its end."""
    words: Int[np.ndarray, " tokens"] | None = None
    """The number of the word that each token belongs to, within its row; None where words are not known."""
    weights: Float[np.ndarray, " tokens"] | None = None
    """The weight of each token in the loss, 1 where it is not scored; None where no message has one."""
    numbers: Int[np.ndarray, " rows"] | None = None
    """By which what is drawn of a row is told from other rows'; None where nothing is drawn."""
    groups: Int[np.ndarray, " groups+1"] | None = None
    """Where the rows of each row of the dataset begin, which stay together; None where each is one row here."""
    doubts: Int[np.ndarray, " groups"] | None = None
    """What is doubtful in each row of the dataset (see `lowtide.data.report.doubts`); None where nothing is."""
    rounds: Sequence[Rounds] | None = None
    """Of each row those of its completion, where this is of several turns, else (); None where no row has any."""
    own_token: bool = False
    """Labels are predicted at their own tokens. Else a row's first label is never scored, whatever its value: no token
    comes before it to predict it."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return np.diff(self.offsets)

    def scored_counts(self) -> Int[np.ndarray, " rows"]:
        """How many tokens of each row are scored."""
        return count_scored(self.labels, self.offsets, own_token=self.own_token)

    def cut(self, start: Int[np.ndarray, " rows"], stop: Int[np.ndarray, " rows"]) -> "TokenRows":
        """Keep the tokens `start:stop` of each row, counted within the row."""
        if np.array_equal(stop - start, self.lengths):
            return self
        prompts = self.prompt_lengths
        if prompts is not None:
            prompts = np.clip(prompts, start, stop) - start
        return replace(self.take(*range_index(self.offsets[:-1] + start, stop - start)), prompt_lengths=prompts)

    def take(self, index: Int[np.ndarray, " kept"], offsets: Int[np.ndarray, " rows+1"]) -> "TokenRows":
        """The tokens at these places, and where each row begins among them."""
        known = {"token_ids": self.token_ids, "labels": self.labels, "words": self.words, "weights": self.weights}
        return replace(self, offsets=offsets, **{name: each[index] for name, each in known.items() if each is not None})


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
    labels: Int[np.ndarray, " tokens"], offsets: Int[np.ndarray, " segments+1"], *, own_token: bool = False
) -> Int[np.ndarray, " segments"]:
    """How many labels of each segment are scored; the first only where labels are predicted at their own tokens."""
    scored = labels != IGNORED
    starts = offsets[:-1]
    if not own_token:
        scored[starts[np.diff(offsets) > 0]] = False
    total = np.zeros(len(labels) + 1, dtype=np.int64)
    np.cumsum(scored, out=total[1:])
    return total[offsets[1:]] - total[starts]


def optional_columns(rows: TokenRows) -> dict[str, pa.Array]:
    """The columns of what is not known of all rows."""
    columns: dict[str, pa.Array] = {}
    if rows.words is not None:
        columns["words"] = list_column(rows.words, rows.offsets)
    if rows.weights is not None:
        columns[WEIGHTS] = weights_column(rows.weights, rows.offsets)
    if rows.numbers is not None:
        columns["number"] = pa.array(rows.numbers, pa.int64())
    return columns


def list_column(values: Int[np.ndarray, " tokens"], offsets: Int[np.ndarray, " rows+1"]) -> pa.ListArray:
    """An Arrow column of 32-bit lists over these values."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))


def weights_column(weights: Float[np.ndarray, " tokens"], offsets: Int[np.ndarray, " rows+1"]) -> pa.ListArray:
    """The column of the weights of tokens; null for rows in which each is 1."""
    lengths, others = np.diff(offsets), np.append(0, np.cumsum(weights != 1))
    plain = others[offsets[1:]] == others[offsets[:-1]]
    ends = np.append(0, np.cumsum(np.where(plain, 0, lengths)))
    kept = weights[np.repeat(~plain, lengths)]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(kept, pa.float32()), mask=pa.array(plain))
