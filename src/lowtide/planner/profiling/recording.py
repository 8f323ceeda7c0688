"""What living storages held while a run went on: blocks, when each was born and freed, and the phases of the run.

How that is watched differs between a CPU (`live_storages`) and CUDA (`cuda_history`); what is asked of it does not. A
block's category is what it became: a gradient is one from its first byte, though nobody knew when it was made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from lowtide.step.phases import BETWEEN

CATEGORIES = ("weights", "gradients", "optimizer", "reference", "activations", "head", "other")
"""As they are stacked: what stays lies below what comes and goes."""
BORN_IN = {
    "forward": "activations",
    "head": "head",
    "backward": "activations",
    "optimizer": "optimizer",
    "evaluation": "activations",
    "rehearsal": "optimizer",
}
"""The category of what is made in a phase and becomes nothing else; what is made in others is "other"."""
INTERNAL = ("torch", "accelerate", "jaxtyping", "lowtide/planner", "contextlib.py", "functools.py")
"""Whose lines say nothing of where a tensor comes from."""


@dataclass
class Block:
    """One storage, from birth to its end."""

    category: str
    phase: str
    """In which it was born."""
    step: int
    """0 before the first."""
    made: str
    """Name of the weight that it is (of), or of the operation that made it."""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    line: str = ""
    """The line of code that made it, outside of torch; empty where it was there before."""


@dataclass
class Mark:
    """Where a phase begins: after so many events."""

    event: int
    seconds: float
    step: int
    phase: str


@dataclass
class Recording:
    """Events in their order, each a change of a block's size."""

    blocks: list[Block] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    """[events]: whose size changes."""
    change: list[int] = field(default_factory=list)
    """[events]: by so many bytes."""
    seconds: list[float] = field(default_factory=list)
    """[events]: since the recording began."""
    marks: list[Mark] = field(default_factory=lambda: [Mark(0, 0.0, 0, BETWEEN)])

    def add(self, block: int, change: int, seconds: float) -> None:
        """One event."""
        self.block.append(block)
        self.change.append(change)
        self.seconds.append(seconds)

    def enter(self, phase: str, step: int, seconds: float) -> None:
        """A phase begins."""
        self.marks.append(Mark(len(self.block), seconds, step, phase))

    def levels(self) -> Levels:
        """The bytes by category after each event."""
        category = np.array([CATEGORIES.index(block.category) for block in self.blocks], dtype=np.int64)
        events = len(self.block)
        bytes = np.zeros((events, len(CATEGORIES)), dtype=np.int64)
        bytes[np.arange(events), category[np.array(self.block, dtype=np.int64)]] = self.change
        mark = np.searchsorted([mark.event for mark in self.marks], np.arange(events), side="right") - 1
        return Levels(np.array(self.seconds), np.cumsum(bytes, axis=0), mark)

    def living(self, event: int) -> list[tuple[int, Block]]:
        """(bytes, block) of what lives after an event, largest first."""
        size = np.zeros(len(self.blocks), dtype=np.int64)
        np.add.at(size, self.block[: event + 1], self.change[: event + 1])
        order = np.argsort(-size, kind="stable")
        return [(int(size[number]), self.blocks[number]) for number in order if size[number] > 0]

    def phases(self, levels: Levels) -> dict[str, dict[str, int]]:
        """For each phase, the bytes by category when it held most."""
        names = np.array([mark.phase for mark in self.marks])[levels.mark]
        found = {}
        for phase in dict.fromkeys(names.tolist()):
            inside = np.flatnonzero(names == phase)
            found[phase] = by_category(levels.bytes[inside[levels.total[inside].argmax()]])
        return found


@dataclass(frozen=True)
class Levels:
    """Bytes over time."""

    seconds: Shaped[np.ndarray, " events"]
    bytes: Int[np.ndarray, "events categories"]
    """In the order of `CATEGORIES`."""
    mark: Int[np.ndarray, " events"]
    """Number of the mark that an event comes after."""

    @functools.cached_property
    def total(self) -> Int[np.ndarray, " events"]:
        return self.bytes.sum(axis=1)

    @property
    def peak(self) -> int:
        """The event after which most was held."""
        return int(self.total.argmax())

    def held(self, spans: int) -> tuple[Shaped[np.ndarray, " spans"], Int[np.ndarray, " spans"]]:
        """(when each of so many equal spans of time begins, the event after which most was held in it).

        What a span begins with counts too, so that a picture of few spans has every peak and holds every level.
        """
        starts = np.linspace(float(self.seconds[0]), float(self.seconds[-1]), spans, endpoint=False)
        first = np.searchsorted(self.seconds, starts, side="right") - 1
        last = np.append(first[1:], len(self.seconds) - 1)
        events = [a + int(self.total[a : b + 1].argmax()) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        return starts, np.array(events, dtype=np.int64)


def by_category(bytes: Sequence[int] | np.ndarray) -> dict[str, int]:
    """Names to bytes, without those of which there are none."""
    return {name: int(count) for name, count in zip(CATEGORIES, bytes, strict=True) if count}


@functools.cache
def short_file(file: str) -> str:
    """A file as a reader knows it: from its package on, or from the working folder."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    path = Path(file)
    for root in (Path(__file__).parents[3], Path.cwd()):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return file


@functools.cache
def is_internal(file: str) -> bool:
    """Whether a file's lines say nothing of where a tensor comes from."""
    short = short_file(file)
    return file.startswith("<") or any(short.startswith(f"{name}/") or short.endswith(name) for name in INTERNAL)
