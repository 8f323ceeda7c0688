"""Rows in pieces, for plans: a second search, over token budgets below the longest row.

In pieces a row takes a forward more, and each piece is a forward and a backward of its own, so whole rows are looked at
first. What does not depend on the tokens of a piece is what the row's keys and values take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.planner.estimate import Estimate
from lowtide.planner.search import ROUND, Candidate, Refused, Search, Sizes

LEAST_TOKENS = 128
"""Of the shortest pieces that a plan proposes."""
MOST_PIECES = 16
"""Into which a plan cuts the longest row. A trace runs each of them."""
WORTH = 1.4
"""Pieces are looked at where whole rows take this many times the seconds of the plain settings: a row in pieces takes
a third more than these, as it does with checkpointing."""


class Searches:
    """For whole rows, and for rows in pieces where these do not do.

    Args:
        search_of: makes a search over some sizes of a micro-batch.
        sizes: of whole rows, or of rows in pieces where the user says the budget.
        pieces: of rows in pieces; None where none may be cut.
    """

    def __init__(self, search_of: Callable[[Sizes], Search], sizes: Sizes, pieces: Sizes | None) -> None:
        self.whole, self._search_of, self._sizes = search_of(sizes), search_of, pieces
        self._pieces: Search | None = None
        self.why_whole: str | None = None
        """Why rows cannot be run in pieces, where that was looked for."""

    @property
    def traces(self) -> int:
        """That were made."""
        return sum(each.traces for each in self._made())

    @property
    def gave_up(self) -> bool:
        """Whether the time was over before all was tried that might fit."""
        return any(each.gave_up for each in self._made())

    @property
    def tried(self) -> str:
        """What was tried, in a clause."""
        every = sum(len(each.combinations) for each in self._made())
        tried = (
            f"of {every:,} combinations of settings {self.traces:,} were traced, and the others predicted from these"
        )
        if not self.gave_up:
            return tried
        return f"{tried}; the search ended after {self.whole.patience.seconds:.0f} s, before all that might fit were"

    def _made(self) -> list[Search]:
        return [self.whole] if self._pieces is None else [self.whole, self._pieces]

    def plain(self) -> Estimate:
        """Whole rows with the plain settings.

        Raises:
            Refused: they cannot be traced.
        """
        return self.whole.traced(self.whole.plain, None)

    def best(self, runners_up: int = 0) -> list[Candidate]:
        """The fastest settings that fit, which are traced, and others, which may be predicted to be as fast; empty if
        nothing fits.

        Raises:
            Refused: the plain settings cannot be traced.
        """
        found = self.fitting(runners_up)
        traced = next((each for each in found if each.estimate is not None), None)
        traced = traced or self._smallest_that_fit()
        if traced is None:
            return []
        return [traced, *(each for each in found if each is not traced)][: runners_up + 1]  # the others are predicted

    def fitting(self, runners_up: int = 0, worth: float = float("inf")) -> list[Candidate]:
        """What fits, best first, where no prediction was too high.

        Args:
            worth: the cost above which a candidate is not wanted.

        Raises:
            Refused: the plain settings cannot be traced.
        """
        found = self.whole.best(runners_up, worth)
        if found and not found[0].is_last_resort:
            cost, plain = found[0].cost, self.whole.cost(self.whole.plain, None)
            if cost <= WORTH * plain:
                return found
            worth = cost
        search = self.pieces()
        found += [] if search is None else search.best(runners_up, worth)
        return sorted(found, key=lambda each: each.rank)

    def _smallest_that_fit(self) -> Candidate | None:
        """The best of what takes least, where predictions were too high for all that fits."""
        self.smallest()
        fitting = [first for each in self._there() for first in each.fitting()[:1]]
        return min(fitting, key=lambda each: each.rank, default=None)

    def pieces(self) -> Search | None:
        """The search over rows in pieces; None where rows cannot be run so."""
        if self._sizes is not None and self._pieces is None and self.why_whole is None:
            if self.whole.patience.is_over:
                self.whole.gave_up = True
                return None
            search = self._search_of(self._sizes)
            try:
                search.traced(search.plain, None)
            except Refused as reason:
                self.why_whole = str(reason)
            else:
                self._pieces = search
        return self._pieces

    def smallest(self) -> Candidate:
        """What takes least, whether it fits or not; traced.

        Raises:
            Refused: nothing can be traced.
        """
        return min((each.smallest() for each in self._there()), key=lambda each: each.peak)

    def _there(self) -> Sequence[Search]:
        pieces = self.pieces()
        return [self.whole] if pieces is None else [self.whole, pieces]


def sizes_in_pieces(sizes: Sizes) -> Sizes | None:
    """The tokens of the shortest and the longest pieces of the longest row; None where it is too short to be cut, or
    where the user says the budget."""
    least, most = (_rounded(sizes.longest / count) for count in (MOST_PIECES, 2))
    least = max(least, LEAST_TOKENS)
    return None if sizes.given or least > most else Sizes(least, most, in_pieces=True)


def _rounded(tokens: float) -> int:
    return int(-(-tokens // ROUND)) * ROUND
