"""Foretells the peak of a run before any weight is made: the trainer's own step, on tensors without memory.

A trainer of five layers is built and steps once, on fake tensors; what its storages do is noted, unrolled to as many
layers as the model has, and replayed through a model of the memory that the run will have: the living bytes, and on
top the holes in the heap or in the device's cache, and what the process holds beside tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.memory.measure import bytes_text
from lowtide.planner.glibc_heap import GlibcHeap
from lowtide.planner.trace import Block, Moment


@dataclass(frozen=True)
class Estimate:
    """What a run will take, in bytes."""

    peak_bytes: int
    phase: str
    """In which the peak falls."""
    phases: Mapping[str, Mapping[str, int]]
    """For each phase, the bytes by category when it holds most."""
    device: str
    band: float = 0.06
    """By how much of itself the peak may be wrong."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.phases[self.phase].items() if size)
        return f"peak {bytes_text(self.peak_bytes)} on {self.device}, in {self.phase}: {parts}"


RUN = ("loading", "gradients", "step", "states", "clear", "step", "clear")
REHEARSED = ("loading", "room", "gradients", "step", "clear", "end", "gradients", *RUN[2:])
"""The parts of a run, in their order: its first step makes the optimizer's states, its second finds them there."""


def parts_of(moments: Iterable[Moment]) -> dict[str, list[Moment]]:
    """The moments by the part of the run that they are of."""
    parts: dict[str, list[Moment]] = {}
    part = parts.setdefault("loading", [])
    for moment in moments:
        if moment.block is None and moment.born:
            part = parts.setdefault(moment.phase, [])
        else:
            part.append(moment)
    return parts


def run_of(moments: Iterable[Moment], *, rehearsal: bool) -> Iterator[Moment]:
    """The moments of a run of two steps, from those of its parts."""
    parts = parts_of(moments)
    for name in REHEARSED if rehearsal else RUN:
        yield from parts.get(name, ())


def peaks(moments: Iterable[Moment], heap: GlibcHeap) -> dict[str, Counter[str]]:
    """For each phase the bytes by category, holes among them as "runtime", when the heap held most.

    A block may be born again, as one of another step, when it has died.
    """
    live: Counter[str] = Counter()
    alive: set[Block] = set()
    total, most, found = 0, Counter[str](), {}
    for block, born, phase, _ in moments:
        if block is None:
            heap.trim()
            continue
        if born == (block in alive):
            continue
        size = block.size if born else -block.size
        if born:
            alive.add(block)
            heap.born(block, block.size, mapped=phase == "loading")
        else:
            alive.discard(block)
            heap.died(block)
        live[block.category] += size
        total += size
        if heap.held > most[phase]:
            most[phase] = heap.held
            found[phase] = Counter(live)
            found[phase]["runtime"] = heap.held - total
    return found
