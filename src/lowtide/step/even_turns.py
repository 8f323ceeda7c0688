"""What a rank runs in a step whose weights are gathered in every forward and backward, where rows are run in pieces.

Such a forward is one of all ranks, so all of them run the same passes in the same order: forwards without gradients,
and forwards with a backward. Each rank's longest rows come first, beside those of the other ranks: so many forwards
without gradients as the longest of them takes, and then so many with a backward. A rank whose row has fewer pieces, or
that has no such row, runs its other micro-batches there, and empty ones when these run out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import gathered, worst_of_ranks
from lowtide.step.pieces import LongRow


class Passes(NamedTuple):
    """Forwards that a row in pieces takes."""

    first: int
    """Without gradients."""
    backward: int
    """With a backward."""


class IdleForwards(NamedTuple):
    """Empty forwards without gradients."""

    batch: RaggedBatch
    count: int


class Turn(NamedTuple):
    """What comes next in a step."""

    number: int
    """Of the micro-batch."""
    part: RaggedBatch | LongRow | None
    idle: IdleForwards | None = None
    """What precedes it."""


@dataclass(frozen=True)
class EvenTurns:
    """How all ranks run equally many passes in a step."""

    slots: tuple[Passes, ...]
    """Each for a row in pieces of every rank, or of some."""
    rest: int
    """Micro-batches after these."""

    @classmethod
    def agreed(
        cls, parts: Sequence[RaggedBatch | LongRow], first_of: Callable[[LongRow], int], device: torch.device
    ) -> EvenTurns:
        """Of all ranks, which call it together.

        Args:
            parts: this rank's, those in pieces first.
            first_of: the forwards without gradients of a row in pieces.
        """
        own = [passes_of(part, first_of) for part in parts if isinstance(part, LongRow)]
        count = worst_of_ranks(len(own), device)
        own += [Passes(0, 0)] * (count - len(own))
        short = sum(isinstance(part, RaggedBatch) for part in parts)
        mine = torch.tensor([[*(number for passes in own for number in passes), short]], device=device)
        everyones = gathered(mine)
        most = everyones.max(0).values[:-1].view(count, 2).tolist()
        slots = tuple(Passes(first, backward) for first, backward in most)
        room = sum(slot.backward for slot in slots) - everyones[:, 1:-1:2].sum(1)
        return cls(slots, max(int((everyones[:, -1] - room).max()), 0))

    def turns(
        self, parts: Sequence[RaggedBatch | LongRow], first_of: Callable[[LongRow], int], idle: RaggedBatch
    ) -> list[Turn]:
        """This rank's, as many of each kind as any other's.

        Args:
            parts: as `agreed` was given them.
            idle: an empty micro-batch, of which nothing is scored.
        """
        long_rows = [(number, part) for number, part in enumerate(parts) if isinstance(part, LongRow)]
        others = [Turn(number, part) for number, part in enumerate(parts) if isinstance(part, RaggedBatch)]
        found: list[Turn] = []
        for place, slot in enumerate(self.slots):
            taken = Passes(0, 0)
            number, row = long_rows[place] if place < len(long_rows) else (len(parts), None)
            if row is not None:
                taken = passes_of(row, first_of)
            found.append(Turn(number, row, IdleForwards(idle, slot.first - taken.first)))
            found += _taken(others, slot.backward - taken.backward, len(parts), idle)
        return found + _taken(others, self.rest, len(parts), idle)


def passes_of(row: LongRow, first_of: Callable[[LongRow], int]) -> Passes:
    """The forwards of a row in pieces."""
    return Passes(first_of(row), len(row.pieces))


def _taken(others: list[Turn], count: int, number: int, idle: RaggedBatch) -> list[Turn]:
    """So many of the other micro-batches, which they leave; empty ones, of that number, when these run out."""
    found, others[:count] = others[:count], []
    return found + [Turn(number, idle)] * (count - len(found))


def pieces_first(parts: Sequence[RaggedBatch | LongRow]) -> list[RaggedBatch | LongRow]:
    """The rows in pieces first, those with the most before the others."""
    return sorted(parts, key=lambda part: -len(part.pieces) if isinstance(part, LongRow) else 0)
