"""A batch laid out in the order of a plan: its micro-batches are views of it, and a long row's are in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lowtide.compat.torch import FakeTensor
from lowtide.engine.heads.head import ScoreOutput
from lowtide.ops.attention.piece_keys import KeyPlace, PieceKeys
from lowtide.ragged import RaggedBatch, Segment, arranged, sent
from lowtide.step_plan import LEAST, Limits, MicroBatch, PiecePlan, Span, cut_rows


@dataclass(frozen=True)
class Piece:
    """What one forward sees."""

    batch: RaggedBatch
    """Where `cut` shares them, with each prompt that several rows repeat once: its rows can't be told apart."""
    scores: Int[Tensor, " scores"] | None = None
    """Their places among those of the micro-batch; None of one that has all of them, in order."""
    after: int = -1
    """The piece that it goes on from; -1 for none."""


@dataclass(frozen=True)
class Part:
    """A micro-batch: one piece, or those of a long row."""

    batch: RaggedBatch
    """As its loss reads it; forwards see the pieces."""
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, batch: RaggedBatch, pieces: Sequence[PiecePlan] = (), places: np.ndarray | None = None) -> Part:
        """A batch as one micro-batch.

        Args:
            pieces: those of a batch of one row, where it is run in pieces.
            places: of the scores of that row; read off the batch if None.
        """
        if not pieces:
            return cls(batch, (Piece(batch),))
        places = _score_places(batch) if places is None else places
        return cls(batch, tuple(_piece(batch, places, each) for each in pieces))

    def read(self, number: int) -> RaggedBatch:
        """What the loss of a piece is read from, whose scores are those that its forward sees."""
        return self.batch if len(self.pieces) == 1 else self.pieces[number].batch

    def keys(self, place: KeyPlace) -> list[PieceKeys | None]:
        """For each piece what its layers keep, which is nothing yet; None for those that stand alone."""
        if len(self.pieces) == 1:
            return [None]
        made: list[PieceKeys] = []
        for piece in self.pieces:
            longest = max(part.length for part in piece.batch.segments)
            made.append(PieceKeys(longest, made[piece.after] if piece.after >= 0 else None, place=place))
        for piece in self.pieces:
            if piece.after >= 0:
                made[piece.after].keeps = True
        for keys in reversed(made):
            keys.way_tokens = max(keys.way_tokens, keys.start + keys.tokens)
            if keys.before is not None:
                keys.before.way_tokens = max(keys.before.way_tokens, keys.way_tokens)
        longest = max(keys.way_tokens for keys in made)
        for keys in made:
            keys.row_tokens = longest
        return [keys if keys.keeps or keys.before is not None else None for keys in made]

    def in_order(self, found: Sequence[Tensor]) -> Tensor:
        """[scores, ..] of the micro-batch, from those of its pieces."""
        if len(self.pieces) == 1:
            return found[0]
        joined = torch.cat([*found])
        order = torch.cat([piece.scores for piece in self.pieces if piece.scores is not None])
        return torch.empty_like(joined).index_copy_(0, order.to(joined.device), joined)

    def joined(self, outputs: Sequence[ScoreOutput]) -> ScoreOutput:
        """The output of the micro-batch from those of its pieces: statistics in the order of its scores, losses added
        up."""
        if len(self.pieces) == 1:
            return outputs[0]
        losses = [output.loss for output in outputs if output.loss is not None]
        stats = {name: self.in_order([output.stats[name] for output in outputs]) for name in outputs[0].stats}
        return ScoreOutput(torch.stack(losses).sum() if losses else None, stats)

    def with_values(self, name: str, values: Tensor) -> Part:
        """With another value of each score."""

        def added(batch: RaggedBatch, own: Tensor) -> RaggedBatch:
            return replace(batch, score_values={**batch.score_values, name: own})

        pieces = [
            replace(piece, batch=added(piece.batch, values if piece.scores is None else values[piece.scores]))
            for piece in self.pieces
        ]
        return Part(added(self.batch, values), tuple(pieces))


def parts_of(batch: RaggedBatch, limits: Limits, device: torch.device | None = None) -> list[Part]:
    """The micro-batches of a batch within the limits, each long row in pieces; `device` as of `cut`."""
    return cut(batch, cut_rows(batch.segments, limits), device)


def split(batch: RaggedBatch, limits: Limits, device: torch.device | None = None) -> list[RaggedBatch]:
    """The micro-batches of a batch within the limits; `device` as of `cut`.

    Raises:
        ValueError: a row is above the token budget; names it.
    """
    plan = cut_rows(batch.segments, limits, why_whole_rows="")
    return [part.batch for part in cut(batch, plan, device, share=False)]


def idle_part(batch: RaggedBatch, most: int | None, device: torch.device | None = None) -> Part:
    """An empty micro-batch for a rank that has nothing left to run where others have: the smallest row, unscored, and
    of a row above the budget its first tokens alone."""
    tokens = batch.row_tokens
    idle = batch.select_rows([tokens.index(min(tokens))]).unscored()
    if most is not None and idle.tokens > most:
        first = idle.segments[0]
        few = Span(0, first.start, first.start + min(first.length, LEAST))
        idle = _piece(idle, _score_places(idle), PiecePlan((few,))).batch
    return Part.of(idle.to(device or idle.token_ids.device))


# -- micro-batches as views --------------------------------------------------------------------------------------------


def cut(
    batch: RaggedBatch, plan: Sequence[MicroBatch], device: torch.device | None = None, *, share: bool = True
) -> list[Part]:
    """The micro-batches of a plan, which has each row of the batch once.

    Args:
        device: where they are; a batch in host memory is laid out there, and copied once. By default the batch's own.
        share: whether a forward computes a prompt that several rows repeat once.
    """
    if not plan:
        return []
    of_row = batch.row_segments
    groups = [[number for row in each.rows for number in of_row[row]] for each in plan]
    whole = [batch.to(device or batch.token_ids.device)] if len(plan) == 1 else arranged(batch, groups, device=device)
    seen, repeated = [*whole], {}
    for place, group in enumerate(groups if share else ()):
        if not plan[place].pieces and (found := batch.repeated_prefixes(group)):
            repeated[place] = found
    if repeated:
        kept = [[number for number in groups[place] if number not in found] for place, found in repeated.items()]
        stands_for = {prefix: first for found in repeated.values() for prefix, first in found.items()}
        for place, each in zip(repeated, arranged(batch, kept, stands_for=stands_for, device=device), strict=True):
            seen[place] = each
    return [_part(batch, *each) for each in zip(whole, seen, plan, strict=True)]


def _part(batch: RaggedBatch, part: RaggedBatch, seen: RaggedBatch, planned: MicroBatch) -> Part:
    """A micro-batch, of a row in pieces by their places in the row, of which the segments stand together.

    Args:
        seen: what its forward sees, where it has one.
    """
    if not planned.pieces:
        return Part(part, (Piece(seen),))
    numbers = [number for number, each in enumerate(batch.segments) if each.row == planned.rows[0]]
    first, start = numbers[0], batch.segments[numbers[0]].start
    scores = slice(batch.segments[first].score_start, batch.segments[numbers[-1]].score_stop)
    places = _values(batch.score_index[scores])
    pieces = [
        piece._replace(spans=tuple(Span(n - first, begin - start, end - start) for n, begin, end in piece.spans))
        for piece in planned.pieces
    ]
    return Part.of(part, pieces, None if places is None else places - start)


# -- pieces ------------------------------------------------------------------------------------------------------------


def _score_places(row: RaggedBatch) -> np.ndarray:
    """The place of each score; of a row without values, spread evenly over its tokens."""
    places = _values(row.score_index)
    return np.arange(row.scores) * row.tokens // max(row.scores, 1) if places is None else places


def _values(tensor: Tensor) -> np.ndarray | None:
    """The values of a tensor; None of one that has none."""
    return None if isinstance(tensor, FakeTensor) else tensor.cpu().numpy()


def _piece(row: RaggedBatch, places: np.ndarray, planned: PiecePlan) -> Piece:
    if planned.whole:
        kept = [each.segment for each in planned.spans]
        spans = [torch.arange(row.segments[n].score_start, row.segments[n].score_stop) for n in kept]
        return Piece(row.select_segments(kept), torch.cat(spans))
    parts: list[Segment] = []
    scores: list[int] = []
    index: list[int] = []
    token = 0
    for each in planned.spans:
        own = np.flatnonzero((places >= each.start) & (places < each.stop))
        length = each.stop - each.start
        parts.append(Segment(token, token + length, -1, 0, len(scores), len(scores) + len(own)))
        index += (places[own] - each.start + token).tolist()
        scores += own.tolist()
        token += length
    chosen = torch.tensor(scores, dtype=torch.long)
    return Piece(_of_spans(row, planned.spans, parts, chosen, index), chosen, planned.after)


def _of_spans(
    row: RaggedBatch, spans: Sequence[Span], parts: Sequence[Segment], scores: Int[Tensor, " scores"], index: list[int]
) -> RaggedBatch:
    """The batch of some spans of a row, each a segment."""
    chosen = sent(scores, row.token_ids.device)

    def taken(values: Tensor) -> Tensor:
        return torch.cat([values[..., each.start : each.stop] for each in spans], -1)

    return RaggedBatch.assembled(
        taken(row.token_ids),
        taken(row.position_ids),
        sent(torch.tensor(index, dtype=torch.long), chosen.device),
        row.score_target[chosen],
        parts,
        row.row_values,
        {name: values[chosen] for name, values in row.score_values.items()},
        ((), None if row.axis_positions is None else taken(row.axis_positions)),
    )
