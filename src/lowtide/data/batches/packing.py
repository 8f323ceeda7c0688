"""Packing: which rows, or pieces of rows, share a bin of a given capacity in tokens.

Only lengths are looked at, so no token is touched before the plan is made. Three strategies, under TRL's names:

- `bfd`: best-fit decreasing (longest first, each into the fullest bin that still takes it), after cutting every
  row to the capacity. Keeps rows whole; the cut tokens are counted.
- `bfd_split`: the same, with the overflow of a long row kept as further pieces. No token is lost.
- `wrapped`: rows one after the other in their order, cut every `capacity` tokens. No token is lost, many rows are
  cut.

Best-fit decreasing comes from Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), who
find the bin by a tree search for every row. Here it is done by runs. Lengths are integers, so many rows are alike,
and so are many bins; and while the bin that was the best fit for one row of length n has room for another, it
stays the best fit for that one (its space has shrunk, and nothing smaller had room before). So a run of bins with
the same space is filled with rows of the same length in one go, and the cost is per length and run, not per row.
The bins are, one for one, those of the search by row.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int

Strategy = Literal["bfd", "bfd_split", "wrapped"]


@dataclass(frozen=True)
class Packing:
    """Which pieces of which rows go into which bin.

    A piece is the token range `start:stop` of one source row; the pieces of bin `b` are
    `bin_offsets[b]:bin_offsets[b + 1]`, in the order in which they lie in the bin. A row without tokens has no
    piece.
    """

    row: Int[np.ndarray, " pieces"]
    """The source row of each piece."""
    start: Int[np.ndarray, " pieces"]
    """The piece's first token in its source row."""
    stop: Int[np.ndarray, " pieces"]
    """One past the piece's last token in its source row."""
    bin_offsets: Int[np.ndarray, " bins+1"]
    """Where each bin's pieces begin and end."""
    capacity: int
    """The most tokens that a bin holds."""
    tokens_cut: int
    """Source tokens that are in no piece."""

    @property
    def bins(self) -> int:
        """How many bins there are."""
        return len(self.bin_offsets) - 1

    @property
    def tokens(self) -> int:
        """How many tokens the bins hold together."""
        return int((self.stop - self.start).sum())

    @property
    def fill(self) -> float:
        """The share of the bins' capacity that holds tokens, from 0 to 1; 1 where there is no bin."""
        return self.tokens / (self.bins * self.capacity) if self.bins else 1.0


def pack(lengths: Int[np.ndarray, " rows"], capacity: int, strategy: Strategy = "bfd") -> Packing:
    """Plan bins of at most `capacity` tokens for rows of these `lengths` (in tokens).

    Deterministic: among rows of the same length the earlier one goes first, and among bins with the same space the
    one that has had it for longest.

    Raises:
        ValueError: an unknown strategy, a capacity below 1, or lengths that are not whole numbers from 0 on.
    """
    lengths = _checked(lengths, capacity, strategy)
    if strategy == "wrapped":
        return _wrap(lengths, capacity)
    row, start, stop = _pieces(lengths, capacity, keep_overflow=strategy == "bfd_split")
    sizes = stop - start
    shortfall = (capacity - sizes).astype(np.min_scalar_type(capacity))  # a 16-bit type is sorted by radix
    longest_first = np.argsort(shortfall, kind="stable")
    bin_of = _best_fit(sizes[longest_first], capacity)
    by_bin = np.argsort(bin_of, kind="stable")
    order = longest_first[by_bin]
    return Packing(
        row=row[order],
        start=start[order],
        stop=stop[order],
        bin_offsets=_offsets(bin_of[by_bin]),
        capacity=capacity,
        tokens_cut=int(lengths.sum() - sizes.sum()),
    )


def _checked(lengths: Int[np.ndarray, " rows"], capacity: int, strategy: str) -> Int[np.ndarray, " rows"]:
    known = get_args(Strategy)
    if strategy not in known:
        nearest = get_close_matches(strategy, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"packing strategy {strategy!r} is unknown (nearest: {nearest!r}); use one of {', '.join(known)}"
        )
    if capacity < 1:
        raise ValueError(f"packing needs a capacity of at least 1 token, not {capacity}; set max_length")
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.size and not np.issubdtype(lengths.dtype, np.integer)):
        raise ValueError(
            f"row lengths must be a flat list of whole numbers, not {lengths.dtype} of shape {lengths.shape}"
        )
    lengths = lengths.astype(np.int64)
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"row {int(lengths.argmin())} has a negative length, {int(lengths.min())}")
    return lengths


def _pieces(
    lengths: Int[np.ndarray, " rows"], capacity: int, *, keep_overflow: bool
) -> tuple[Int[np.ndarray, " pieces"], Int[np.ndarray, " pieces"], Int[np.ndarray, " pieces"]]:
    """Row, start and stop of the pieces of at most `capacity` tokens that rows are packed as."""
    per_row = -(-lengths // capacity) if keep_overflow else np.minimum(lengths, 1)
    row = np.repeat(np.arange(len(lengths)), per_row)
    start = _within(per_row) * capacity
    return row, start, np.minimum(start + capacity, lengths[row])


def _best_fit(sizes: Int[np.ndarray, " pieces"], capacity: int) -> Int[np.ndarray, " pieces"]:
    """The bin of each piece, for sizes in decreasing order; bins are numbered as they are opened."""
    bins = _Bins(capacity)
    fills: list[tuple[int, int, int]] = []
    distinct, counts = np.unique(sizes, return_counts=True)
    for size, pieces in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while pieces:
            space, first, count = bins.take(size, pieces)
            each = space // size
            placed = min(pieces, count * each)
            full, rest = divmod(placed, each)
            bins.put(space - each * size, first, full)
            bins.put(space - rest * size, first + full, count - full)
            fills.append((first, each, placed))
            pieces -= placed
    return _spread(fills)


class _Bins:
    """The bins that still have space, as runs of consecutive bins with the same space."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.opened = 0
        self.spaces: list[int] = []
        """The spaces that some bin has, ascending."""
        self.runs: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        """For each space the runs (first bin, bins) that have it, those that have had it for longest first."""

    def take(self, size: int, pieces: int) -> tuple[int, int, int]:
        """A run with the least space >= size, no longer than needed: (space, first bin, bins); opens new bins."""
        at = bisect_left(self.spaces, size)
        if at == len(self.spaces):
            needed = -(-pieces // (self.capacity // size))
            first, self.opened = self.opened, self.opened + needed
            return self.capacity, first, needed
        space = self.spaces[at]
        first, count = self.runs[space].popleft()
        needed = -(-pieces // (space // size))
        if count > needed:
            self.runs[space].appendleft((first + needed, count - needed))
            count = needed
        if not self.runs[space]:
            del self.spaces[at]
        return space, first, count

    def put(self, space: int, first: int, count: int) -> None:
        """Give back a run of bins; one that is full or empty of bins is let go."""
        if space and count:
            if not self.runs[space]:
                insort(self.spaces, space)
            self.runs[space].append((first, count))


def _spread(fills: list[tuple[int, int, int]]) -> Int[np.ndarray, " pieces"]:
    """The bin of each piece, from the fills in order: (first bin, pieces a bin, pieces)."""
    first, each, placed = np.array(fills, dtype=np.int64).reshape(-1, 3).T
    return np.repeat(first, placed) + _within(placed) // np.repeat(each, placed)


def _within(counts: Int[np.ndarray, " groups"]) -> Int[np.ndarray, " items"]:
    """0, 1, ... for each group of so many items, one group after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _offsets(bin_of: Int[np.ndarray, " pieces"]) -> Int[np.ndarray, " bins+1"]:
    """Where each bin's pieces begin and end, for pieces sorted by bin."""
    return np.concatenate([[0], np.cumsum(np.bincount(bin_of))]).astype(np.int64)


def _wrap(lengths: Int[np.ndarray, " rows"], capacity: int) -> Packing:
    """One piece for each bin that a row reaches into, all rows lying end to end."""
    end = np.cumsum(lengths)
    begin = end - lengths
    bins = np.where(lengths > 0, (end - 1) // capacity - begin // capacity + 1, 0)
    row = np.repeat(np.arange(len(lengths)), bins)
    bin_of = (begin // capacity)[row] + _within(bins)
    return Packing(
        row=row,
        start=np.maximum(bin_of * capacity, begin[row]) - begin[row],
        stop=np.minimum((bin_of + 1) * capacity, end[row]) - begin[row],
        bin_offsets=_offsets(bin_of),
        capacity=capacity,
        tokens_cut=0,
    )
