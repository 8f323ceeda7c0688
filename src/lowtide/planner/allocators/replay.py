"""A run put together from its traced parts and replayed: what lives in each phase, and what an allocator holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from lowtide.planner.tracing.trace import ELSEWHERE, Block, Event

REST = ("states", "clear", "evaluation", "rollout", "gradients", "step", "optimizer", "clear", "saving")
RUN = ("loading", "rollout", "gradients", "step", *REST)
REHEARSAL = ("room", "gradients", "step", "clear")
REHEARSED = ("loading", *REHEARSAL, "rollout", "gradients", "step", "end", *REST)
"""The parts of a run, in their order: its first step makes the optimizer's states, its second finds them there."""


class Allocator(Protocol):
    """What holds the blocks that live."""

    @property
    def held(self) -> int: ...

    def born(self, key: Any, size: int, mapped: bool = False) -> None: ...

    def died(self, key: Any) -> None: ...

    def trim(self) -> None: ...


def run_of(events: Iterable[Event], *, rehearsal: bool) -> Iterator[Event]:
    """The events of a run of two steps, from those of its parts."""
    parts: dict[str, list[Event]] = {}
    part = parts.setdefault("loading", [])
    for event in events:
        if event.block is None and event.born:
            part = parts.setdefault(event.phase, [])
        else:
            part.append(event)
    for name in REHEARSED if rehearsal else RUN:
        yield from parts.get(name, ())


def peaks(events: Iterable[Event], allocator: Allocator | None = None) -> dict[str, dict[str, int]]:
    """For each phase the bytes by category when living tensors held most, and as "cache" what an allocator held beyond
    them at its own peak of that phase.

    A block may be born again, as one of another step, when it has died.
    """
    live: Counter[str] = Counter()
    alive: set[Block] = set()
    total, most, held = 0, Counter[str](), Counter[str]()
    found: dict[str, dict[str, int]] = {}
    for block, born, phase, _ in events:
        if block is None:
            if allocator is not None:
                allocator.trim()
            continue
        if born == (block in alive) or block.category in ELSEWHERE:
            continue
        (alive.add if born else alive.discard)(block)
        if allocator is not None and born:
            allocator.born(block, block.size, mapped=phase == "loading")
        elif allocator is not None:
            allocator.died(block)
        size = block.size if born else -block.size
        live[block.category] += size
        total += size
        held[phase] = max(held[phase], total if allocator is None else allocator.held)
        if total > most[phase] or phase not in found:
            most[phase] = total
            found[phase] = {name: size for name, size in live.items() if size}
    return {phase: {**parts, "cache": held[phase] - most[phase]} for phase, parts in found.items()}
