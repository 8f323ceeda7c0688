"""The lengths of a dataset's rows, and what each `max_length` would cost: the numbers behind `lowtide lengths`.

`max_length` is mostly set blindly, and it decides how many tokens are thrown away, how many positions are padding and
how full packed bins get. All three follow from the lengths alone. Pure computation: it is rendered elsewhere
(`lengths_report.py`, the command line).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from lowtide.data.batches.packing import Strategy, pack
from lowtide.data.report.ledger import padding_share

BATCH_SIZES = (1, 4, 8, 16, 32)
"""The batch sizes for which padding is computed."""
MAX_TOKENS_CUT = 0.001
"""The largest share of the tokens that a recommended `max_length` may cut."""
MAX_ROWS_CUT = 0.01
"""The largest share of the rows that a recommended `max_length` may cut."""
MOST_CANDIDATES = 12
"""Above so many candidates, only powers of two are kept."""


@dataclass(frozen=True)
class LengthChoice:
    """What one `max_length` would do to a dataset. Shares are from 0 to 1."""

    max_length: int
    tokens_cut: float
    """The share of all tokens that is beyond `max_length`."""
    rows_cut: float
    """The share of the rows that are longer than `max_length`."""
    padding: dict[int, float]
    """For each batch size, the share of positions that are padding: rows in dataset order, each batch as long as its
    longest row."""
    bins: int
    """How many bins of `max_length` tokens the rows pack into."""
    fill: float
    """The share of the bins' capacity that holds tokens."""

    @property
    def keeps_enough(self) -> bool:
        """Whether it cuts no more than a recommended `max_length` may."""
        return self.tokens_cut <= MAX_TOKENS_CUT and self.rows_cut <= MAX_ROWS_CUT


@dataclass(frozen=True)
class LengthReport:
    """How long the rows are, and what each candidate for `max_length` would do."""

    lengths: Int[np.ndarray, " distinct"]
    """The lengths that occur, ascending."""
    counts: Int[np.ndarray, " distinct"]
    """How many rows have each."""
    candidates: tuple[LengthChoice, ...]
    """By `max_length`, ascending."""
    packing_strategy: Strategy
    """How the candidates' bins were packed."""

    @classmethod
    def from_lengths(
        cls,
        lengths: Int[np.ndarray, " rows"],
        max_lengths: Sequence[int] | None = None,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        packing_strategy: Strategy = "bfd",
    ) -> "LengthReport":
        """The report for rows of these `lengths` in tokens, in dataset order.

        Args:
            lengths: the tokens of each row.
            max_lengths: the candidates; powers of two and the halves between them if None, from the median up.
            batch_sizes: the batch sizes for which padding is computed.
            packing_strategy: see `packing`.

        Raises:
            ValueError: there is no token at all, or a candidate or a batch size is below 1.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        if not lengths.sum():
            raise ValueError(f"no tokens in {len(lengths)} rows, so there are no lengths to report")
        max_lengths = sorted(set(_usual(lengths) if max_lengths is None else max_lengths))
        for option, values in (("max_length", max_lengths), ("batch_size", batch_sizes)):
            if min(values, default=0) < 1:
                raise ValueError(f"{option} must be at least 1, not {min(values, default=None)}")
        sizes = sorted(set(batch_sizes))
        candidates = tuple(_candidate(lengths, cap, sizes, packing_strategy) for cap in max_lengths)
        return cls(*np.unique(lengths, return_counts=True), candidates, packing_strategy)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """How many tokens the rows have together."""
        return int(self.lengths @ self.counts)

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int(self.lengths[-1])

    def percentile(self, percent: float) -> int:
        """The least length that so many percent of the rows do not exceed."""
        return int(self.lengths[np.searchsorted(np.cumsum(self.counts), self.rows * percent / 100)])

    def cut(self, max_length: int) -> tuple[float, float]:
        """The share of the tokens beyond `max_length`, and of the rows longer than it."""
        over = np.maximum(self.lengths - max_length, 0)
        return float(over @ self.counts) / self.tokens, float(self.counts[over > 0].sum()) / self.rows

    def histogram(self) -> tuple[Int[np.ndarray, " bars+1"], Int[np.ndarray, " bars"]]:
        """Edges, about four to an octave, and how many rows are from each edge up to the next. Empty rows are in the
        first bar."""
        steps = np.arange(4 * self.longest.bit_length() + 1) / 4
        edges = np.unique(np.ceil(2**steps).astype(np.int64))
        shortest = max(int(self.lengths[0]), 1)
        edges = edges[np.searchsorted(edges, shortest, "right") - 1 : np.searchsorted(edges, self.longest, "right") + 1]
        bar = np.searchsorted(edges, np.maximum(self.lengths, 1), "right") - 1
        return edges, np.bincount(bar, self.counts, minlength=len(edges) - 1).astype(np.int64)

    @property
    def recommended(self) -> LengthChoice:
        """The smallest candidate that keeps enough, or else the largest."""
        return next((candidate for candidate in self.candidates if candidate.keeps_enough), self.candidates[-1])

    @property
    def reason(self) -> str:
        """Why that one, in a sentence or two."""
        best = self.recommended
        rule = f"at most {MAX_TOKENS_CUT:.1%} of the tokens and {MAX_ROWS_CUT:.0%} of the rows"
        rows = round(best.rows_cut * self.rows)
        does = f"it cuts {share(best.tokens_cut)} of the tokens, in {rows:,} of {self.rows:,} rows"
        if not rows:
            does = "it cuts nothing"
        if best.keeps_enough:
            return f"{best.max_length:,} is the smallest candidate that cuts {rule}: {does}."
        return (
            f"No candidate cuts {rule}; {best.max_length:,} is the largest: {does}. "
            f"The longest row has {self.longest:,} tokens: try a larger max_length."
        )


def share(value: float) -> str:
    """A share from 0 to 1 as a percentage that shows small ones: 12.3%, 0.12%, 0.0012%; 0% is exactly nothing."""
    if not value:
        return "0%"
    digits = 1 if value >= 0.01 else 2 if value >= 0.001 else 3
    return f"{value:.{digits}%}" if value >= 0.00001 else "<0.001%"


def _candidate(
    lengths: Int[np.ndarray, " rows"], max_length: int, batch_sizes: Sequence[int], strategy: Strategy
) -> LengthChoice:
    kept = np.minimum(lengths, max_length)
    packing = pack(lengths, max_length, strategy)
    return LengthChoice(
        max_length=max_length,
        tokens_cut=float((lengths - kept).sum() / lengths.sum()),
        rows_cut=float((lengths > max_length).mean()),
        padding={size: padding_share(kept, size) for size in batch_sizes},
        bins=packing.bins,
        fill=packing.fill,
    )


def _usual(lengths: Int[np.ndarray, " rows"]) -> list[int]:
    """Powers of two and the halves between them, from the median to the first that cuts nothing."""
    longest = int(lengths.max())
    last = max(longest - 1, 1).bit_length()  # 2**last is the first power of two that holds the longest row
    first = min(int(np.median(lengths)).bit_length(), last)
    powers = [2**exponent for exponent in range(first, last + 1)]
    between = [3 * power // 4 for power in powers if power >= 4]
    steps = sorted({*powers, *between})
    enough = [step for step in steps if step < longest] + [step for step in steps if step >= longest][:1]
    return enough if len(enough) <= MOST_CANDIDATES else powers
