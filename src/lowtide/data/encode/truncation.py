"""Cutting rows that are too long.

Every limit keeps one contiguous range of a row: `max_prompt_length` keeps the end of the prompt and
`max_completion_length` the start of the completion, which meet; then `max_length` keeps the start or the end of
what is left. So truncation is two integers a row, computed for all rows at once. The names are TRL's.

Completions that share a prompt keep the same of it, where TRL, keeping the end, cuts each side for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int

from lowtide.data.batches.token_rows import TokenRows, range_index

TruncationMode = Literal["keep_start", "keep_end"]


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """The limits on a row's length, in tokens. None is no limit."""

    max_length: int | None = None
    """The most tokens that a row keeps."""
    mode: TruncationMode = "keep_start"
    """Which end of the row `max_length` keeps."""
    max_prompt_length: int | None = None
    """The most tokens that a prompt keeps: its last ones, which stand next to the completion."""
    max_completion_length: int | None = None
    """The most tokens that a completion keeps: its first ones."""

    def __post_init__(self) -> None:
        for name in ("max_length", "max_prompt_length", "max_completion_length"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is {limit}; it must be at least 1, or None for no limit.")
        if self.mode not in get_args(TruncationMode):
            raise ValueError(f"truncation_mode is {self.mode!r}; it must be 'keep_start' or 'keep_end'.")

    @property
    def keeps_starts(self) -> bool:
        """Whether a token is kept by its place in its row alone."""
        return not self.limits_parts and (self.max_length is None or self.mode == "keep_start")

    @property
    def limits_parts(self) -> bool:
        """Whether prompts and completions have limits of their own."""
        return self.max_prompt_length is not None or self.max_completion_length is not None


def kept_range(
    lengths: Int[np.ndarray, " rows"],
    prompt_lengths: Int[np.ndarray, " rows"] | None,
    truncation: Truncation,
) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
    """The range `start:stop` of tokens that each row keeps."""
    start, stop = np.zeros_like(lengths), lengths.copy()
    if truncation.max_prompt_length is not None and prompt_lengths is not None:
        start = np.maximum(prompt_lengths - truncation.max_prompt_length, 0)
    if truncation.max_completion_length is not None and prompt_lengths is not None:
        stop = np.minimum(stop, prompt_lengths + truncation.max_completion_length)
    if truncation.max_length is not None:
        if truncation.mode == "keep_start":
            stop = np.minimum(stop, start + truncation.max_length)
        else:
            start = np.maximum(start, stop - truncation.max_length)
    return start, stop


def truncate(rows: TokenRows, truncation: Truncation) -> tuple[TokenRows, Int[np.ndarray, " rows"]]:
    """Cut rows to the limits; gives the rows and how many tokens each lost."""
    start, stop = kept_range(rows.lengths, rows.prompt_lengths, truncation)
    return rows.cut(start, stop), rows.lengths - (stop - start)


def kept_ranges(
    lengths: Sequence[Int[np.ndarray, " rows"]], prompt_lengths: Int[np.ndarray, " rows"], truncation: Truncation
) -> list[tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]]:
    """The range that each side of a row keeps, where the sides share a prompt and keep the same of it.

    The side that can keep the least of the prompt decides; one whose completion alone is too long keeps no prompt.
    """
    ranges = [kept_range(side, prompt_lengths, truncation) for side in lengths]
    prompt_start = np.minimum(np.maximum.reduce([start for start, _ in ranges]), prompt_lengths)
    return [(np.maximum(start, prompt_start), stop) for start, stop in ranges]


def cut_before_end(rows: TokenRows, most: int | None, special: Int[np.ndarray, " special"]) -> TokenRows:
    """Rows of so many tokens at most: their first ones, and the special ones that end them, as tokenizers cut."""
    if most is None or (rows.lengths <= most).all():
        return rows
    ends = np.minimum(_trailing(np.isin(rows.token_ids, special), rows.offsets), most)
    kept = np.minimum(rows.lengths, most)
    starts = np.stack([rows.offsets[:-1], rows.offsets[1:] - ends], axis=1).ravel()
    index, bounds = range_index(starts, np.stack([kept - ends, ends], axis=1).ravel())
    return rows.take(index, bounds[::2])


def _trailing(marks: Bool[np.ndarray, " tokens"], offsets: Int[np.ndarray, " rows+1"]) -> Int[np.ndarray, " rows"]:
    """How many tokens at the end of each row have a mark."""
    plain = np.append(-1, np.flatnonzero(~marks))
    last = plain[np.searchsorted(plain, offsets[1:]) - 1]
    return offsets[1:] - np.maximum(last + 1, offsets[:-1])
