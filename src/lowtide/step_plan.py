"""One optimizer step as a plan: a value of integers, made once on the host and executed by one loop.

A batch is cut into micro-batches between rows. A row above the token budget is a tree of pieces: a prompt is cut into
pieces that go on from one another; its completions go on from the last of them, several in one piece where they fit, or
in pieces of their own. Segments that go on from nothing, such as those of a packed row, are trees of their own.

What runs are acts. `Score` is a forward without gradients, `Join` works out a loss and its slope at each score from
what was scored, `Train` is a forward and backward. A plain micro-batch is a `Train`. A row in pieces is `Score`s, in
which layers keep what later pieces see, a `Join` where the loss is of rows, and `Train`s from its last piece to its
first. A loss of the whole batch is `Score`s, one `Join` over ranks, and `Train`s.

No tensor is read here, so that a plan never waits for a device, and other ranks' plans follow from a few integers.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from lowtide.ragged import Segment

LEAST = 16
"""Tokens of a piece below which a budget is no longer worth its calls."""
IDLE = -1
"""The place of an empty micro-batch, which runs where another rank has more to run."""


@dataclass(frozen=True)
class Limits:
    """The strict caps on a micro-batch."""

    rows: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Needs:
    """What a run asks of each of its steps."""

    loss_over: str = "row"
    """What has to be scored before a loss is known: a "score", a "row", or all rows of a "step", of all ranks."""
    terms: int = 1
    """Losses that are added up, each forward and backward by itself."""
    why_whole_rows: str | None = None
    """What keeps rows above the budget from being run in pieces, as a clause; None if nothing does."""
    meet: str = "never"
    """Where ranks wait for one another between the beginning of a step and its end: "never", in "each backward", or in
    "each forward"."""
    stages: int = 1
    """Ranks that the layers are split between."""
    pairs: int = 0
    """So many pairs of a query and a key cost what the products of one token do; 0 where only tokens count."""


# -- micro-batches and pieces ------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Neighbouring tokens of one segment, by their places in the batch."""

    segment: int
    start: int
    stop: int


Spans = tuple[Span, ...]


class PiecePlan(NamedTuple):
    """A piece of a long row."""

    spans: Spans
    after: int = -1
    """The piece that it goes on from; -1 for none."""
    whole: bool = False
    """It holds whole segments with all that they see."""

    @property
    def tokens(self) -> int:
        return sum(each.stop - each.start for each in self.spans)


class MicroBatch(NamedTuple):
    """Rows that run together, or one row above the token budget in pieces."""

    rows: tuple[int, ...]
    """Of the batch, ascending."""
    tokens: int
    scores: int
    pieces: tuple[PiecePlan, ...] = ()
    """Those before others first; () of one that is a single forward."""

    @property
    def forwards(self) -> int:
        """Forwards of one pass over it."""
        return max(len(self.pieces), 1)

    @property
    def inner(self) -> list[int]:
        """The pieces that others go on from."""
        return sorted({piece.after for piece in self.pieces if piece.after >= 0})

    @property
    def heaviest(self) -> int:
        """Tokens of its heaviest forward."""
        return max((piece.tokens for piece in self.pieces), default=self.tokens)


class RowSizes:
    """What a plan reads of the segments of a batch.

    Args:
        segments: of the batch, those of a row together.
        pairs: as of `Needs`.
    """

    def __init__(self, segments: Sequence[Segment], pairs: int = 0) -> None:
        self.segments, self.pairs = segments, pairs
        self.of_row: list[list[int]] = [[] for _ in range(segments[-1].row + 1)]
        """The segments of each row."""
        for number, part in enumerate(segments):
            self.of_row[part.row].append(number)
        self.tokens = [sum(segments[n].length for n in numbers) for numbers in self.of_row]
        self.scores = [segments[numbers[-1]].score_stop - segments[numbers[0]].score_start for numbers in self.of_row]
        self.attended = [0] * len(self.tokens)
        """The pairs of a query and a key of each row; 0 where they cost nothing."""
        self.shareable: dict[int, list[tuple[int, int]]] = {}
        """By row, (key, length) of its prefixes that one forward computes for several rows at once."""
        for part in segments:
            if pairs:
                self.attended[part.row] += part.length * (part.after(segments) + (part.length + 1) // 2)
            if part.key and part.score_start == part.score_stop:
                self.shareable.setdefault(part.row, []).append((part.key, part.length))

    def tokens_of(self, rows: Iterable[int]) -> int:
        """The tokens of some rows together, where a prefix that several of them repeat is computed once."""
        total, seen = 0, set()
        for row in rows:
            total += self.tokens[row]
            for key in self.shareable.get(row, ()):
                if key in seen:
                    total -= key[1]
                seen.add(key)
        return total

    def cost(self, rows: Sequence[int]) -> int:
        """What some rows cost together, in tokens: products grow with these, attention with the pairs that attend."""
        return self.tokens_of(rows) + sum(self.attended[row] for row in rows) // (self.pairs or 1)

    def micro_batch(self, rows: Sequence[int], pieces: tuple[PiecePlan, ...] = ()) -> MicroBatch:
        return MicroBatch(tuple(rows), self.tokens_of(rows), sum(self.scores[row] for row in rows), pieces)

    def in_pieces(self, row: int, most: int) -> MicroBatch:
        """A row in pieces of at most so many tokens; of one without scores, whose gradient is zero, the first piece
        stands for all."""
        pieces = tuple(plan_pieces(self.segments, self.of_row[row], most))
        return self.micro_batch([row], pieces if self.scores[row] else pieces[:1])

    def refuse(self, limits: Limits, reason: str) -> None:
        """Refuses a longest row above the token budget.

        Raises:
            ValueError: names the row, and says why it is not run in pieces.
        """
        longest = max(range(len(self.tokens)), key=self.tokens.__getitem__)
        tokens, most = self.tokens[longest], limits.tokens
        if most is not None and tokens > most:
            raise ValueError(
                f"row {longest} of the batch alone has {tokens:,} tokens, above the token budget of {most:,} a "
                f"micro-batch{f', and is not run in pieces, since {reason}' if reason else ''}: raise "
                f"`tokens_per_microbatch` to at least {tokens:,}, or lower `max_length`"
            )


def cut_rows(
    segments: Sequence[Segment], limits: Limits, *, least: int = 1, why_whole_rows: str | None = None, pairs: int = 0
) -> list[MicroBatch]:
    """The rows of a batch in balanced micro-batches within the limits: those in pieces first, and of these as of others
    the heaviest first, so that ranks run what is as heavy beside one another.

    Args:
        segments: of the batch.
        least: cut into so many micro-batches at least, as far as there are rows.
        why_whole_rows: what keeps rows above the token budget from being run in pieces, as a clause or "".
        pairs: as of `Needs`.

    Raises:
        ValueError: a row is above the token budget, and cannot be run in pieces; names it, and says why.
    """
    sizes, most = RowSizes(segments, pairs), limits.tokens
    if why_whole_rows is None and most is not None and most < LEAST:
        why_whole_rows = f"a piece has at least {LEAST} tokens"
    if why_whole_rows is not None:
        sizes.refuse(limits, why_whole_rows)
    rows = range(len(sizes.tokens))
    long = [row for row in rows if most is not None and sizes.tokens[row] > most]
    long.sort(key=lambda row: -sizes.tokens[row])
    short = [row for row in rows if most is None or sizes.tokens[row] <= most] if long else rows
    found = [sizes.in_pieces(row, most) for row in long if most is not None]
    groups = _grouped(sizes, short, limits, least - len(long)) if short else []
    groups.sort(key=lambda group: -sizes.cost(group))
    return [*found, *(sizes.micro_batch(group) for group in groups)]


def plan_pieces(segments: Sequence[Segment], numbers: Sequence[int], most: int) -> list[PiecePlan]:
    """The pieces of a row, of at most so many tokens each.

    Args:
        numbers: the segments of the row, ascending.
    """
    spans = {number: Span(number, segments[number].start, segments[number].stop) for number in numbers}
    trees = [
        (spans[number], *(spans[n] for n in numbers if segments[n].prefix == number))
        for number in numbers
        if segments[number].prefix < 0
    ]
    return _filled(trees, most, 0, functools.partial(_tree, segments, most))


def _filled(
    items: Iterable[Spans],
    most: int,
    first: int,
    divided: Callable[[Spans, int], list[PiecePlan]],
    after: int = -1,
) -> list[PiecePlan]:
    """Spans in pieces, several in one where they fit; the first of these pieces is piece number `first`.

    Args:
        items: spans that stand in one piece, where they have at most so many tokens together.
        divided: the pieces of others, the first of which has the number that it is given.
        after: the piece that they go on from; -1 of whole segments with all that they see.
    """
    plan: list[PiecePlan] = []
    room, beside = 0, -1
    for spans in items:
        piece = PiecePlan(spans, after, whole=after < 0)
        if piece.tokens > most:
            plan += divided(spans, first + len(plan))
            continue
        if piece.tokens > room:
            beside, room = len(plan), most
            plan.append(piece)
        else:
            plan[beside] = piece._replace(spans=tuple(sorted(plan[beside].spans + spans)))
        room -= piece.tokens
    return plan


def _tree(segments: Sequence[Segment], most: int, spans: Spans, first: int) -> list[PiecePlan]:
    """The pieces of a segment, the first of which is piece number `first`, and of those that go on from it: wherever
    these do, one of its pieces ends."""
    plan: list[PiecePlan] = []
    (number, begin, stop), *others = spans
    after = -1
    ends = {other: begin + segments[other.segment].after(segments) for other in others}
    last: dict[int, int] = {}
    for end in sorted({*ends.values(), stop}):
        plan += _divided(segments, most, after, (Span(number, begin, end),), first + len(plan))
        begin, after = end, first + len(plan) - 1
        last[end] = after
    for end, after in last.items():
        own = [(other,) for other in others if ends[other] == end]
        plan += _filled(own, most, first + len(plan), functools.partial(_divided, segments, most, after), after)
    return plan


def _divided(segments: Sequence[Segment], most: int, after: int, spans: Spans, first: int) -> list[PiecePlan]:
    """A span in pieces of nearly equal length, the first of which is piece number `first`."""
    ((number, start, stop),) = spans
    begin, uncut = segments[number].start, segments[number].uncut
    bounds = [begin + place for place in _bounds(start - begin, stop - begin, most, uncut)]
    return [
        PiecePlan((Span(number, low, high),), after if n == 0 else first + n - 1)
        for n, (low, high) in enumerate(pairwise(bounds))
    ]


def _bounds(start: int, stop: int, most: int, uncut: frozenset[int]) -> list[int]:
    """Where pieces of at most so many tokens begin and end: of nearly equal length, unless that cuts what is read
    together; else each as long as it may be.

    Raises:
        ValueError: more tokens than that are read together.
    """
    length, count = stop - start, -(-(stop - start) // most)
    bounds = [start + length * n // count for n in range(count + 1)]
    if uncut.isdisjoint(bounds):
        return bounds
    bounds = [start]
    while stop - bounds[-1] > most:
        allowed = (place for place in range(bounds[-1] + most, bounds[-1], -1) if place not in uncut)
        if (place := next(allowed, None)) is None:
            raise ValueError(
                f"more than {most:,} neighbouring tokens of a row are compared as one span of text, which a token "
                "budget must not cut: raise `tokens_per_microbatch`"
            )
        bounds.append(place)
    return [*bounds, stop]


# -- balance -----------------------------------------------------------------------------------------------------------


def _grouped(sizes: RowSizes, rows: Sequence[int], limits: Limits, least: int) -> list[list[int]]:
    """Some rows, each within the caps, in balanced groups."""
    families = _families(sizes, rows, limits)
    count = max(least, 1)
    if limits.tokens is not None:
        count = max(count, -(-sum(map(sizes.tokens_of, families)) // limits.tokens))
    if limits.rows is not None:
        count = max(count, -(-len(rows) // limits.rows))
    while len(families) < count and (divided := _halved(families)):
        families = divided
    count = min(count, len(families))
    while (groups := _balanced(sizes, families, count, limits)) is None:
        count += 1
    return groups


def _families(sizes: RowSizes, among: Iterable[int], limits: Limits) -> list[list[int]]:
    """Rows that repeat a prefix together, as many as the caps let; every other row by itself."""
    by_prefix: dict[tuple[int, int], list[int]] = {}
    for row in among:
        shared = sizes.shareable.get(row)
        by_prefix.setdefault(shared[0] if shared else (-1, row), []).append(row)
    families: list[list[int]] = []
    for (_, length), rows in by_prefix.items():
        family, total = [], 0
        for row in rows:
            cost = sizes.tokens[row] - (length if family else 0)
            full = limits.rows is not None and len(family) == limits.rows
            if family and (full or (limits.tokens is not None and total + cost > limits.tokens)):
                families.append(family)
                family, total, cost = [], 0, sizes.tokens[row]
            family.append(row)
            total += cost
        families.append(family)
    return families


def _halved(families: Sequence[list[int]]) -> list[list[int]]:
    """The largest family in two; nothing where all are of one row."""
    largest = max(range(len(families)), key=lambda number: len(families[number]))
    rows = families[largest]
    if len(rows) < 2:
        return []
    half = len(rows) // 2
    return [*families[:largest], rows[:half], rows[half:], *families[largest + 1 :]]


def _balanced(sizes: RowSizes, families: Sequence[Sequence[int]], count: int, limits: Limits) -> list[list[int]] | None:
    """Heaviest family first into the lightest group with room (Graham's LPT), or None if there is one without room."""
    groups: list[list[int]] = [[] for _ in range(count)]
    tokens, lightest = [0] * count, [(0, number) for number in range(count)]

    def has_room(number: int, rows: Sequence[int], more: int) -> bool:
        full = limits.rows is not None and len(groups[number]) + len(rows) > limits.rows
        return not full and (limits.tokens is None or tokens[number] + more <= limits.tokens)

    costs = [sizes.cost(family) for family in families]
    for family in sorted(range(len(families)), key=lambda number: (-costs[number], number)):
        rows, more, passed = families[family], sizes.tokens_of(families[family]), []
        while lightest and not has_room(lightest[0][1], rows, more):
            passed.append(heapq.heappop(lightest))
        if not lightest:
            return None
        load, number = lightest[0]
        groups[number] += rows
        tokens[number] += more
        heapq.heapreplace(lightest, (load + costs[family], number))
        for each in passed:
            if limits.rows is None or len(groups[each[1]]) < limits.rows:
                heapq.heappush(lightest, each)
    return [sorted(group) for group in groups if group]


# -- acts --------------------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """A forward without gradients."""

    part: int
    """The micro-batch, or `IDLE`."""
    piece: int = 0
    term: int = 0
    reads: bool = True
    """Whether its scores are read; else its layers run for what they keep."""
    keeps: bool = False
    """Whether what its layers keep is there for a `Train` too, and not for later pieces' `Score`s alone."""


class Join(NamedTuple):
    """A loss, and its slope at each score, from what was scored of some micro-batches."""

    parts: tuple[int, ...]
    term: int = 0


class Train(NamedTuple):
    """A forward and backward."""

    part: int
    piece: int = 0
    term: int = 0


Act = Score | Join | Train


class Passes(NamedTuple):
    """Forwards that a row in pieces takes."""

    first: int
    """Without gradients, before its loss is known."""
    backward: int


@dataclass(frozen=True)
class Summary:
    """What other ranks need to know of a rank's micro-batches, where all of them run rows in pieces by one order."""

    long: tuple[Passes, ...] = ()
    """Of each row in pieces."""
    short: int = 0
    """Other micro-batches."""

    @classmethod
    def of(cls, parts: Sequence[MicroBatch], needs: Needs) -> Summary:
        long = [part for part in parts if len(part.pieces) > 1]
        passes = (Passes(len(_first_pass(needs, 0, part)), len(part.pieces)) for part in long)
        return cls(tuple(passes), len(parts) - len(long))


def pieces_first(parts: Iterable[MicroBatch]) -> list[MicroBatch]:
    """The rows in pieces first, those with the most before the others."""
    return sorted(parts, key=lambda part: -len(part.pieces))


def local_acts(parts: Sequence[MicroBatch], needs: Needs, least: int = 1) -> list[Act]:
    """What a rank runs by its own order.

    Args:
        least: micro-batches that each rank runs, with empty ones where its own run out.
    """
    idle = [IDLE] * (max(least, 1) - len(parts))
    numbers = [*range(len(parts)), *idle]
    found = _of_the_step(parts, needs, idle)
    if needs.stages > 1:  # one schedule of all plain micro-batches, and then one of each row in pieces
        numbers.sort(key=lambda number: number >= 0 and len(parts[number].pieces) > 1)
        return [
            *found,
            *(act for term in range(needs.terms) for n in numbers for act in _of_one(parts, n, needs, term)),
        ]
    return [*found, *(act for n in numbers for term in range(needs.terms) for act in _of_one(parts, n, needs, term))]


def even_acts(parts: Sequence[MicroBatch], needs: Needs, everyones: Sequence[Summary]) -> list[Act]:
    """What a rank runs where all ranks run the same passes in the same order, since forwards or backwards are of all of
    them together.

    Each rank's longest rows come first, beside those of the others: so many forwards without gradients as the longest
    of them takes, and then so many with a backward. A rank whose row has fewer pieces, or that has no such row, runs
    its other micro-batches there, and empty ones when these run out.

    Args:
        parts: of this rank, in the order of `pieces_first`.
        everyones: of all ranks, this one's among them.
    """
    longest = max(len(each.long) for each in everyones)
    none = Passes(0, 0)
    slots = [[each.long[n] if n < len(each.long) else none for each in everyones] for n in range(longest)]
    most = [Passes(max(first for first, _ in slot), max(back for _, back in slot)) for slot in slots]
    room = sum(backward for _, backward in most)
    rest = max(max(each.short - (room - sum(back for _, back in each.long)) for each in everyones), 0)
    together = needs.meet == "each forward"
    forwards = max(sum(back for _, back in each.long) + each.short for each in everyones)
    own = sum(part.forwards for part in parts)
    found = _of_the_step(parts, needs, [IDLE] * (forwards - own) if together else [])
    for term in range(needs.terms):
        long = [number for number, part in enumerate(parts) if len(part.pieces) > 1]
        short = iter([number for number, part in enumerate(parts) if len(part.pieces) < 2])

        def others(count: int, short: Iterator[int] = short, term: int = term) -> list[Act]:
            return [Train(next(short, IDLE), 0, term) for _ in range(count)]

        for place, slot in enumerate(most):
            acts = _of_one(parts, long[place], needs, term) if place < len(long) else []
            first = sum(1 for act in acts if type(act) is Score)
            backward = sum(1 for act in acts if type(act) is Train)
            idle = Score(IDLE, term=term, reads=needs.loss_over == "row")
            found += [idle] * (slot.first - first if together else 0)
            found += [*acts, *others(slot.backward - backward)]
        found += others(rest)
    return found


def _of_the_step(parts: Sequence[MicroBatch], needs: Needs, idle: Sequence[int]) -> list[Act]:
    """What comes first where the loss is of the whole batch."""
    if needs.loss_over != "step":
        return []
    together = needs.meet == "each forward"
    scored = [number for number, part in enumerate(parts) if part.scores]
    runs = range(len(parts)) if together else scored
    found: list[Act] = [Score(number, piece) for number in runs for piece in range(parts[number].forwards)]
    return [*found, *(Score(number) for number in idle if together), Join(tuple(scored))]


def _of_one(parts: Sequence[MicroBatch], number: int, needs: Needs, term: int) -> list[Act]:
    """The acts of one micro-batch, for one loss."""
    if number == IDLE or len(parts[number].pieces) < 2:
        return [Train(number, 0, term)]
    part = parts[number]
    found = _first_pass(needs, number, part, term)
    if needs.loss_over == "row":
        found.append(Join((number,), term))
    return [*found, *(Train(number, piece, term) for piece in reversed(range(len(part.pieces))))]


def _first_pass(needs: Needs, number: int, part: MicroBatch, term: int = 0) -> list[Act]:
    """The forwards of a row in pieces that come before those with gradients: of all pieces where its loss has yet to be
    known, else of those that others go on from."""
    reads = needs.loss_over == "row"
    pieces = range(len(part.pieces)) if reads else part.inner
    return [Score(number, piece, term, reads, keeps=True) for piece in pieces]


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of this rank."""

    limits: Limits
    micro_batches: tuple[MicroBatch, ...]
    """Of this rank; none where its rows only stand in."""
    acts: tuple[Act, ...]
    loss_over: str = "row"
    """As of the needs; a whole batch that is one micro-batch of one rank is as any other."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Denominators, over all ranks."""
    ranks: int = 1
    """Those with rows of their own; ranks that hold the same rows are one."""
    reference_ahead: bool = False
    """Whether the reference scores all micro-batches before the policy runs."""

    @property
    def one_forward(self) -> bool:
        """Whether the step is a single micro-batch, and no row in pieces."""
        return len(self.micro_batches) == 1 and self.micro_batches[0].forwards == 1

    @property
    def idles(self) -> bool:
        """Whether an empty micro-batch runs."""
        return any(act[0] == IDLE for act in self.acts)

    @functools.cached_property
    def until_joined(self) -> int:
        """How many acts come before all ranks have met in a `Join`, it among them; 0 where none is of all ranks."""
        if self.loss_over != "step":
            return 0
        return next(number for number, act in enumerate(self.acts, 1) if type(act) is Join)

    @functools.cached_property
    def last(self) -> int:
        """Where the acts of the last micro-batch begin, or of its last piece: by then every other gradient is there."""
        final, start = self.acts[-1], len(self.acts) - 1
        while start and type(before := self.acts[start - 1]) is Train and before[:2] == final[:2]:
            if before.term >= self.acts[start].term:  # another empty one
                break
            start -= 1
        return start


def smaller(heaviest: int, longest: int, *, cuttable: bool) -> int | None:
    """The next smaller token budget, half of the heaviest forward's tokens; None where nothing is left to cut.

    A row is cut only where nothing else is left to cut.

    Args:
        longest: tokens of the longest row.
        cuttable: whether a row alone can be run in pieces.
    """
    budget = max(heaviest // 2, LEAST if cuttable and heaviest <= longest else longest)
    return budget if budget < heaviest else None
