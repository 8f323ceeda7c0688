"""A run put together from its traced parts and replayed: what lives in each phase, and what an allocator holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lowtide.planner.tracing.trace import ELSEWHERE, Block, Event

REST = ("states", "clear", "evaluation", "rollout", "gradients", "step", "optimizer", "clear", "saving")
RUN = ("loading", "rollout", "gradients", "step", *REST)
REHEARSAL = ("room", "gradients", "step", "clear")
REHEARSED = ("loading", *REHEARSAL, "rollout", "gradients", "step", "end", *REST)
"""The parts of a run, in their order: its first step makes the optimizer's states, its second finds them there."""
OVER = Event(None, True, "rehearsed", None)
"""The end of a rehearsal, at which a device gets back what its allocator has cached."""


class Allocator(Protocol):
    """What holds the blocks that live."""

    @property
    def held(self) -> int: ...

    def born(self, key: Any, size: int, mapped: bool = False) -> None: ...

    def died(self, key: Any) -> None: ...

    def trim(self) -> None: ...

    def empty_cache(self) -> None: ...


def run_of(events: Iterable[Event], *, rehearsal: bool) -> Iterator[Event]:
    """The events of a run of two steps, from those of its parts."""
    parts = _parts(events)
    for number, name in enumerate(REHEARSED if rehearsal else RUN):
        if rehearsal and number == 1 + len(REHEARSAL):
            yield OVER
        yield from parts.get(name, ())


def start_of(events: Iterable[Event]) -> Sequence[Event]:
    """The events of a run before its first forward: the model is loaded, and adapters, references and the optimizer are
    made. A weight that is cast or quantized as it is loaded is read from its file, of which no more stays resident."""
    return _parts(events)["loading"]


def _parts(events: Iterable[Event]) -> dict[str, list[Event]]:
    parts: dict[str, list[Event]] = {}
    part = parts.setdefault("loading", [])
    for event in events:
        if event.block is None and event.born:
            part = parts.setdefault(event.phase, [])
        else:
            part.append(event)
    return parts


def peaks(events: Iterable[Event], allocator: Allocator | None = None) -> dict[str, dict[str, int]]:
    """For each phase the bytes by category when living tensors held most, and as "cache" what an allocator held beyond
    them at its own peak of that phase.

    A block may be born again, as one of another step, when it has died.
    """
    live: Counter[str] = Counter()
    alive: set[Block] = set()
    phases: dict[str, _Phase] = {}
    total, name, phase = 0, "", _Phase()
    for block, born, now, _ in events:
        if block is None:
            if allocator is not None:
                allocator.empty_cache() if born else allocator.trim()
            continue
        if born == (block in alive) or block.category in ELSEWHERE:
            continue
        if now != name:
            phase.close(live)
            name, phase = now, phases.setdefault(now, _Phase())
        if born:
            alive.add(block)
            if allocator is not None:
                allocator.born(block, block.size, mapped=now == "loading")
            live[block.category] += block.size
            total += block.size
        else:
            if phase.grown:
                phase.close(live)
            alive.discard(block)
            if allocator is not None:
                allocator.died(block)
            live[block.category] -= block.size
            total -= block.size
        held = total if allocator is None else allocator.held
        if held > phase.held:
            phase.held = held
        if total > phase.most:
            phase.most, phase.grown = total, True
    phase.close(live)
    return {name: {**each.parts, "cache": each.held - each.most} for name, each in phases.items()}


@dataclass(slots=True)
class _Phase:
    """What a phase has seen so far."""

    held: int = 0
    most: int = -1
    parts: dict[str, int] = field(default_factory=dict)
    """By category, what there was of the most."""
    grown: bool = False
    """Whether there is as much as never before, which is noted when something dies."""

    def close(self, live: Mapping[str, int]) -> None:
        """Notes what there is, if it is the most."""
        if self.grown:
            self.parts, self.grown = {name: size for name, size in live.items() if size}, False
