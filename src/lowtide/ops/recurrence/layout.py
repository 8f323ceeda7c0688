"""Where the tokens of segments stand in chunks, and the scan from chunk to chunk.

The chunks of all segments stand in the order in which the scan takes them: first segments without a prefix, then those
that go on from them; the first chunks of each, then the second ones, and so on; segments of more chunks first. So a
step of the scan is a slice, no chunk is computed for another segment's sake, and no segment waits for a longer one. A
segment that others go on from has a chunk's end there, and they start from the state that it had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan, Gather, Places, gathered
from lowtide.ragged import Segment, sent


class _Level(NamedTuple):
    """Segments that are scanned together: those without a prefix, or those with one."""

    segments: Int[Tensor, " members"]
    """Their numbers, those of more chunks first."""
    steps: tuple[tuple[int, int], ...]
    """The chunks of each step of the scan, one for each segment that has so many."""
    kept: tuple[Int[Tensor, " states"] | None, ...]
    """After each step, the members whose state segments of the next level start from."""
    starts: Int[Tensor, " members"] | None
    """The state that each starts from among those that the level before kept; None where none did."""


@dataclass(frozen=True)
class RecurrenceLayout:
    """Where the tokens of segments stand in chunks, and which chunks follow which."""

    chunk: int
    gather: Gather | None
    """How tokens get to their places, [chunks * chunk] of them; None where they stand there already."""
    real: Float[Tensor, "places 1"] | None
    """1 where a place has a token of its own, 0 where it repeats one; None where all have."""
    levels: tuple[_Level, ...]
    order: Int[Tensor, " segments"]
    """Of each segment its number in the order of the levels."""

    @classmethod
    def of(cls, plan: AttentionPlan, chunk: int) -> RecurrenceLayout:
        """The layout of the segments of a plan, made once for all its layers."""
        return plan.once(("recurrence", chunk), lambda: cls._build(plan, chunk))

    @classmethod
    def _build(cls, plan: AttentionPlan, chunk: int) -> RecurrenceLayout:
        before = [part.after(plan.segments) for part in plan.segments]
        cuts = cuts_of(plan.segments, before)
        chunks = [_chunks(part, cut, chunk) for part, cut in zip(plan.segments, cuts, strict=True)]
        levels: list[_Level] = []
        order: list[int] = []
        kept: dict[tuple[int, int], int] = {}  # (segment, tokens) -> number among the states that the level before kept
        places = Places()
        for after in (False, True):
            members = [number for number, seen in enumerate(before) if (seen > 0) == after]
            if not members:
                continue
            members.sort(key=lambda number: -len(chunks[number]))
            starts = [kept[plan.segments[number].prefix, before[number]] for number in members] if after else None
            steps, ranks = [], []
            for step in range(len(chunks[members[0]])):
                taken = [number for number in members if len(chunks[number]) > step]
                first = places.count // chunk
                for number in taken:
                    places.put(chunks[number][step], chunk)
                steps.append((first, first + len(taken)))
                ends = [chunks[number][step].stop - plan.segments[number].start for number in taken]
                wanted = [rank for rank, number in enumerate(taken) if not after and ends[rank] in cuts[number]]
                kept |= {(taken[rank], ends[rank]): len(kept) + n for n, rank in enumerate(wanted)}
                ranks.append(on_device(wanted, plan.device) if wanted else None)
            held = None if starts is None else on_device(starts, plan.device)
            levels.append(_Level(on_device(members, plan.device), tuple(steps), tuple(ranks), held))
            order += members
        real = None
        if places.padded:
            widths = [torch.arange(width) < length for _, length, width in places.spans]
            real = sent(torch.cat(widths).float()[:, None], plan.device)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        gather = places.gather(plan, plan.tokens)
        return cls(chunk, gather, real, tuple(levels), on_device(inverse, plan.device))

    @property
    def counts(self) -> list[int]:
        """Chunks of each step of the scan, in the order of the steps: together all chunks."""
        return [stop - start for level in self.levels for start, stop in level.steps]

    def lay(self, x: Tensor, *, masked: bool = False) -> Tensor:
        """[tokens, ...] to [chunks, chunk, ...]; what repeats a token is zero if masked."""
        x = gathered(x, self.gather)
        if masked and self.real is not None:
            x = x * self.real.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        return x.unflatten(0, (-1, self.chunk))


def scan(
    step: Callable[[int, Tensor | None], tuple[Tensor, Tensor]],
    layout: RecurrenceLayout,
    initial: Tensor | None,
    final: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Goes through the steps of a layout, from states to states.

    Args:
        step: what the tokens of the chunks of a step read, and the states after these chunks, by the number of the step
            and the states before them; without any they are zero.
        initial: [segments, ...], what segments without a prefix start from; zero if None.

    Returns:
        What the tokens of each step read, and the states after the segments, [segments, ...], if `final`.
    """
    outs: list[Tensor] = []
    kept: list[Tensor] = []
    finals: list[Tensor] = []
    for level in layout.levels:
        if level.starts is not None:
            state = torch.cat(kept).index_select(0, level.starts)
        else:
            state = None if initial is None else initial.index_select(0, level.segments)
        ended: list[Tensor] = []
        for (start, stop), wanted in zip(level.steps, level.kept, strict=True):
            if state is not None and state.shape[0] > stop - start:
                ended.append(state[stop - start :])
                state = state[: stop - start]
            out, state = step(len(outs), state)
            outs.append(out)
            if wanted is not None:
                kept.append(state.index_select(0, wanted))
        if final:
            assert state is not None, "a batch has tokens"
            finals += [state, *reversed(ended)]
    return outs, torch.cat(finals).index_select(0, layout.order) if final else None


def on_device(numbers: Sequence[int], device: torch.device) -> Int[Tensor, " numbers"]:
    """Host integers on a device."""
    return sent(torch.tensor(numbers, dtype=torch.long), device)


def cuts_of(segments: Sequence[Segment], before: Sequence[int]) -> list[set[int]]:
    """Of each segment after how many tokens others go on from it."""
    cuts: list[set[int]] = [set() for _ in segments]
    for part, seen in zip(segments, before, strict=True):
        if seen > 0:
            assert before[part.prefix] == 0, "a prefix has no prefix of its own"
            cuts[part.prefix].add(seen)
    return cuts


def _chunks(part: Segment, cuts: set[int], chunk: int) -> list[Segment]:
    """The chunks of a segment, of which one ends at each cut."""
    bounds = sorted({0, part.length, *cuts})
    starts = [start for low, high in itertools.pairwise(bounds) for start in range(low, high, chunk)]
    stops = [*starts[1:], part.length]
    return [Segment(part.start + low, part.start + high, -1, 0, 0, 0) for low, high in zip(starts, stops, strict=False)]
