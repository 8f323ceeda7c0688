"""A row above the token budget as a tree of pieces, each a batch within the budget.

A prompt is cut into pieces that go on from one another; its completions go on from the last of them, several in one
piece where they fit, or in pieces of their own. Segments that go on from nothing, such as those of a packed row, are
trees of their own; those that fit are pieces of whole segments, which leave nothing behind. A score belongs to the
piece that holds its hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lowtide.compat.torch import FakeTensor
from lowtide.ops.piece_keys import KeyPlace, PieceKeys
from lowtide.ragged import RaggedBatch, Segment

LEAST = 16
"""Tokens of a piece below which a budget is no longer worth its calls."""


class Stretch(NamedTuple):
    """Neighbouring tokens of one segment, by their places in the row."""

    segment: int
    start: int
    stop: int


class Planned(NamedTuple):
    """What a piece will hold."""

    stretches: list[Stretch]
    before: int
    """The piece that it goes on from; -1 for none."""
    alone: bool = False
    """It holds whole segments with all that they see, and nothing goes on from it: a batch as any other."""

    @property
    def tokens(self) -> int:
        return sum(each.stop - each.start for each in self.stretches)


@dataclass(frozen=True)
class Piece:
    """One piece of a long row."""

    batch: RaggedBatch
    scores: Int[Tensor, " scores"]
    """Their places among those of the row."""
    before: int
    """The piece that it goes on from; -1 for none."""
    alone: bool
    """As of `Planned`."""


@dataclass(frozen=True)
class LongRow:
    """A row in pieces, those before others first."""

    batch: RaggedBatch
    """The row as a whole, which no forward ever sees."""
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, row: RaggedBatch, most: int) -> LongRow:
        """A batch of one row, in pieces of at most so many tokens."""
        plan = plan_pieces(row.segments, most)
        places = _score_places(row)
        return cls(row, tuple(_piece(row, places, each) for each in plan))

    @property
    def tokens(self) -> int:
        return self.batch.tokens

    @property
    def rows(self) -> int:
        return self.batch.rows

    @property
    def scores(self) -> int:
        return self.batch.scores

    @property
    def inner(self) -> int:
        """Pieces that others go on from."""
        return len({piece.before for piece in self.pieces if piece.before >= 0})

    def keys(self, place: KeyPlace) -> list[PieceKeys | None]:
        """For each piece what its layers keep, which is nothing yet; None for those that stand alone."""
        made: list[PieceKeys] = []
        for piece in self.pieces:
            longest = max(part.length for part in piece.batch.segments)
            made.append(PieceKeys(longest, made[piece.before] if piece.before >= 0 else None, place=place))
        for piece in self.pieces:
            if piece.before >= 0:
                made[piece.before].keeps = True
        for keys in reversed(made):
            keys.way_tokens = max(keys.way_tokens, keys.start + keys.tokens)
            if keys.before is not None:
                keys.before.way_tokens = max(keys.before.way_tokens, keys.way_tokens)
        longest = max(keys.way_tokens for keys in made)
        for keys in made:
            keys.row_tokens = longest
        return [None if piece.alone else keys for piece, keys in zip(self.pieces, made, strict=True)]


def plan_pieces(segments: Sequence[Segment], most: int) -> list[Planned]:
    """The pieces of a row, of at most so many tokens each."""
    plan: list[Planned] = []
    whole: list[Stretch] = []
    room = 0
    for number, part in enumerate(segments):
        if part.prefix >= 0:
            continue
        after = [n for n, each in enumerate(segments) if each.prefix == number]
        family = sorted([number, *after])
        tokens = sum(segments[n].length for n in family)
        if tokens <= most:
            if tokens > room:
                whole, room = [], most
                plan.append(Planned(whole, -1, alone=True))
            whole += [Stretch(n, segments[n].start, segments[n].stop) for n in family]
            room -= tokens
            continue
        plan += _cut(number, part, most, -1, len(plan))
        plan += _completions(segments, after, most, len(plan) - 1)
    return plan


def _cut(number: int, part: Segment, most: int, before: int, first: int) -> list[Planned]:
    """A segment in pieces of nearly equal length, the first of which is piece number `first`."""
    count = -(-part.length // most)
    bounds = [part.start + part.length * n // count for n in range(count + 1)]
    stretches = [Stretch(number, bounds[n], bounds[n + 1]) for n in range(count)]
    return [Planned([each], before if n == 0 else first + n - 1) for n, each in enumerate(stretches)]


def _completions(segments: Sequence[Segment], numbers: Iterable[int], most: int, before: int) -> list[Planned]:
    """Segments that go on from one piece: those that fit together in one, a longer one in several."""
    plan: list[Planned] = []
    room, beside = 0, []
    for number in numbers:
        part = segments[number]
        if part.length > most:
            plan += _cut(number, part, most, before, before + 1 + len(plan))
            continue
        if part.length > room:
            beside, room = [], most
            plan.append(Planned(beside, before))
        beside.append(Stretch(number, part.start, part.stop))
        room -= part.length
    return plan


def _score_places(row: RaggedBatch) -> np.ndarray:
    """The place of each score; of a row without values, spread evenly over its tokens."""
    if isinstance(row.score_index, FakeTensor):
        return np.arange(row.scores) * row.tokens // max(row.scores, 1)
    return row.score_index.cpu().numpy()


def _piece(row: RaggedBatch, places: np.ndarray, planned: Planned) -> Piece:
    segments, stretches = row.segments, planned.stretches
    if planned.alone:
        kept = sorted(each.segment for each in stretches)
        spans = [torch.arange(segments[n].score_start, segments[n].score_stop) for n in kept]
        return Piece(row.select_segments(kept), torch.cat(spans), -1, alone=True)
    parts: list[Segment] = []
    scores: list[int] = []
    index: list[int] = []
    token = 0
    for each in stretches:
        own = np.flatnonzero((places >= each.start) & (places < each.stop))
        length = each.stop - each.start
        parts.append(Segment(token, token + length, -1, 0, len(scores), len(scores) + len(own)))
        index += (places[own] - each.start + token).tolist()
        scores += own.tolist()
        token += length
    batch = _batch(row, stretches, parts, scores, index)
    return Piece(batch, torch.tensor(scores, dtype=torch.long), planned.before, alone=False)


def _batch(
    row: RaggedBatch, stretches: Sequence[Stretch], parts: Sequence[Segment], scores: list[int], index: list[int]
) -> RaggedBatch:
    """The batch of some stretches of a row, each a segment."""
    device = row.token_ids.device
    chosen = torch.tensor(scores, dtype=torch.long, device=device)
    counts = torch.tensor([part.score_stop - part.score_start for part in parts])

    def taken(values: Tensor) -> Tensor:
        return torch.cat([values[..., each.start : each.stop] for each in stretches], -1)

    return RaggedBatch(
        token_ids=taken(row.token_ids),
        position_ids=taken(row.position_ids),
        offsets=torch.tensor([0, *(part.stop for part in parts)], dtype=torch.int32, device=device),
        prefix=torch.full((len(parts),), -1, device=device),
        row=torch.zeros(len(parts), dtype=torch.long, device=device),
        score_index=torch.tensor(index, dtype=torch.long, device=device),
        score_target=row.score_target[chosen],
        score_segment=torch.repeat_interleave(torch.arange(len(parts)), counts, output_size=len(scores)).to(device),
        segments=tuple(parts),
        row_values=row.row_values,
        score_values={name: values[chosen] for name, values in row.score_values.items()},
        axis_positions=None if row.axis_positions is None else taken(row.axis_positions),
    )


def in_pieces(parts: Iterable[RaggedBatch], most: int | None) -> list[RaggedBatch | LongRow]:
    """Parts of a batch, each that is one row above the budget in pieces. Of a row without scores, whose gradient is
    zero, the first piece stands for all."""
    found: list[RaggedBatch | LongRow] = []
    for part in parts:
        if most is None or not is_long(part, most):
            found.append(part)
            continue
        row = LongRow.of(part, most)
        found.append(row if part.scores else row.pieces[0].batch)
    return found


def idle_part(batch: RaggedBatch, most: int | None) -> RaggedBatch:
    """An empty micro-batch for a rank that has nothing left to run where others have: the smallest row, unscored, and
    of a row above the budget its first tokens alone."""
    idle = batch.idle()
    if most is None or not is_long(idle, most):
        return idle
    first = idle.segments[0]
    few = Stretch(0, first.start, first.start + min(first.length, LEAST))
    return _piece(idle, _score_places(idle), Planned([few], -1)).batch


def heaviest_tokens(batch: RaggedBatch, most: int | None, rows: int | None) -> int:
    """The most tokens of a forward within the caps."""
    heaviest = 0
    for group in batch.plan_split(most, rows, long_rows=True):
        tokens = batch.tokens_of(group)
        if most is not None and tokens > most:
            plan = plan_pieces(batch.select_rows(group).segments, most)
            tokens = max(each.tokens for each in plan)
        heaviest = max(heaviest, tokens)
    return heaviest


def is_one_forward(batch: RaggedBatch, most: int | None, rows: int | None) -> bool:
    """Whether a batch is a single micro-batch, and no row in pieces."""
    return len(batch.plan_split(most, rows, long_rows=True)) == 1 and not is_long(batch, most)


def is_long(part: RaggedBatch, most: int | None) -> bool:
    """Whether a part of a batch is one row above the budget."""
    return most is not None and part.rows == 1 and part.tokens > most
