"""Cutting rows that are too long.

Every limit keeps one contiguous range of a row: `max_prompt_length` keeps the end of the prompt and
`max_completion_length` the start of the completion, which meet; then `max_length` keeps the start or the end of
what is left. So truncation is two integers a row, computed for all rows at once. The names are TRL's.

Completions that share a prompt keep the same of it, where TRL, keeping the end, cuts each side for itself. Of a
completion of several rounds each is cut as a row of its own, whose prompt is what stands before its first turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int

from lowtide.data.batches.token_rows import IGNORED, Rounds, TokenRows, range_index

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


def first_round_lengths(side: TokenRows) -> Int[np.ndarray, " rows"]:
    """The tokens of each row up to the end of its first round; of a row without rounds all."""
    if side.rounds is None:
        return side.lengths
    assert side.prompt_lengths is not None
    pairs = zip(side.lengths.tolist(), side.prompt_lengths.tolist(), side.rounds, strict=True)
    return np.array([prompt + own[0][1] if own else length for length, prompt, own in pairs], dtype=np.int64)


def cut_rounds(
    side: TokenRows, start: Int[np.ndarray, " rows"], stop: Int[np.ndarray, " rows"], truncation: Truncation
) -> tuple[TokenRows, Int[np.ndarray, " rows"]]:
    """A side of which some rows have rounds: of these each round is cut as a row of its own, and left out where nothing
    scored is left of it; of the others the range `start:stop` is kept.

    A round that keeps less of the prompt than the row does has what it keeps of it before its own tokens.

    Returns:
        The side, and how many tokens of its prompt each row repeats in this way.
    """
    assert side.rounds is not None
    assert side.prompt_lengths is not None
    firsts, prompts = side.offsets[:-1], np.clip(side.prompt_lengths, start, stop)
    index = [np.arange(*each) for each in zip(firsts + start, firsts + stop, strict=True)]
    unscored = [np.zeros(len(each), dtype=bool) for each in index]
    rounds, repeated = list(side.rounds), np.zeros(len(side), dtype=np.int64)
    for row, own in enumerate(side.rounds):
        if own:
            shared = int(start[row]), int(prompts[row])
            labels = side.labels[side.offsets[row] : side.offsets[row + 1]]
            kept, unscored[row], rounds[row] = _kept(labels, int(side.prompt_lengths[row]), own, shared, truncation)
            index[row] = firsts[row] + kept
            repeated[row] = (kept[shared[1] - shared[0] :] < side.prompt_lengths[row]).sum()
    offsets = np.append(0, np.cumsum([len(each) for each in index]))
    made = side.take(np.concatenate(index), offsets)
    labels = np.where(np.concatenate(unscored), IGNORED, made.labels)
    return replace(made, labels=labels, prompt_lengths=prompts - start, rounds=rounds), repeated


def _kept(
    labels: Int[np.ndarray, " tokens"], prompt: int, rounds: Rounds, shared: tuple[int, int], truncation: Truncation
) -> tuple[Int[np.ndarray, " kept"], Bool[np.ndarray, " kept"], Rounds]:
    """The places of a row that are kept, which of them are no longer scored, and the rounds that are left.

    Args:
        shared: the range of the prompt that the row keeps.
    """
    places, unscored, left = [np.arange(*shared)], [np.zeros(shared[1] - shared[0], dtype=bool)], []
    place = prompt
    for number, (seen, length) in enumerate(rounds):
        whole = np.append(np.arange(seen), np.arange(place, place + length))
        context = int((labels[place : place + length] != IGNORED).argmax()) + seen if number else prompt
        [start], [stop] = kept_range(np.array([len(whole)]), np.array([context]), truncation)
        goes_on = start <= shared[0] < seen
        own = np.arange(seen if goes_on else start, max(stop, seen))
        is_scored = (labels[whole[own]] != IGNORED) & (own >= seen)
        if not goes_on:
            is_scored[:1] = False  # no token predicts it
        if is_scored.any():
            left.append((min(seen, shared[1]) - shared[0] if goes_on else 0, len(own)))
            places.append(whole[own])
            unscored.append(~is_scored)
        place += length
    return np.concatenate(places), np.concatenate(unscored), left


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
