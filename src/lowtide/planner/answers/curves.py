"""What a few traces say of all lengths: bytes of each phase, as a line between traced sizes of a micro-batch.

Within a phase bytes are those of its fullest moment. That is the largest of several that are linear in the tokens, so
a line between two sizes is at or above it: what is between traced sizes is never predicted too low.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from lowtide.planner.devices import Device
from lowtide.planner.speed import Operation, OperationCosts
from lowtide.planner.tracing.fake_run import TracedRun


@dataclass(frozen=True)
class Point:
    """One trace, with what an allocator makes of it."""

    tokens: int
    """Of a micro-batch."""
    micro_batches: int
    """In a step."""
    head_share: float
    costs: Mapping[str, tuple[Mapping[Operation, int], float]]
    """By part of a step, its operations and the bytes that go to the host or come from there."""
    phases: Mapping[tuple[int, ...], Mapping[str, int]]
    """By the workspaces that a device's libraries take, what is held of it in each phase."""
    notes: tuple[str, ...] = ()

    def grown(self, low: Point, high: Point) -> Point:
        """A larger micro-batch, whose phases grow as much as between two others that grow at least as much."""
        phases = {
            spaces: {
                name: size + max(0, high.phases[spaces].get(name, 0) - low.phases[spaces].get(name, 0))
                for name, size in held.items()
            }
            for spaces, held in self.phases.items()
        }
        return replace(self, tokens=self.tokens + high.tokens - low.tokens, phases=phases)

    def tokens_per_second(self, device: Device, tokens: int | None = None) -> float:
        """By a roofline, on one device.

        Args:
            device: with rates.
            tokens: of a micro-batch, of as many more rows; as traced by default. An operation on them is taken to read
                and compute so much more, and is one all the same.
        """
        times = 1.0 if tokens is None else tokens / self.tokens
        micro_batches = self.micro_batches / times
        seconds = self.micro_batch_seconds(device, times) * micro_batches + self.step_seconds(device)
        return self.tokens * self.micro_batches / seconds

    def micro_batch_seconds(self, device: Device, times: float = 1.0, *, attention: bool = False) -> float:
        """Of one micro-batch of so many times the rows; of its attention alone where asked."""
        costs = {
            name: OperationCosts(
                {None: _repeated(operations, times, attention=attention)}, host_bytes=0 if attention else moved * times
            )
            for name, (operations, moved) in self.costs.items()
            if name != STEP
        }
        return TracedRun((), costs, self.tokens, self.micro_batches, self.head_share).micro_batch_seconds(device)

    def step_seconds(self, device: Device) -> float:
        """Of what a step does once, however many micro-batches it has."""
        operations, moved = self.costs[STEP]
        return OperationCosts({None: Counter(operations)}, host_bytes=moved).seconds(device)


STEP = "optimizer"
"""The part of a step that does not depend on its micro-batches."""


def _repeated(operations: Mapping[Operation, int], times: float, *, attention: bool) -> Counter[Operation]:
    """Each on so many times the rows; those of attention alone where asked."""
    found = Counter[Operation]()
    for each, count in operations.items():
        if each.attention or not attention:
            found[each._replace(flops=round(each.flops * times), bytes=round(each.bytes * times))] += count
    return found


class Sized(Protocol):
    """What a curve and a device table ask of a size of a micro-batch: a trace, or what was kept of one."""

    @property
    def tokens(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def phases(self) -> Mapping[tuple[int, ...], Mapping[str, int]]: ...
    def tokens_per_second(self, device: Device, tokens: int | None = None) -> float: ...


@dataclass(frozen=True)
class Curve:
    """The peak of some settings by the tokens of a micro-batch."""

    points: Sequence[Sized]
    """Few, with growing sizes."""

    def peak(self, tokens: int, device: Device, beside: int) -> int:
        """Bytes at some size; below the smallest that was traced as much as that takes.

        Args:
            tokens: of a micro-batch.
            device: of which kind the traces are.
            beside: bytes that a process holds beside the allocator.
        """
        held = [each.phases[device.workspaces] for each in self.points]
        phases = {name for each in held for name in each}
        return beside + max(round(self._at(tokens, [each.get(name, 0) for each in held])) for name in phases)

    def most_tokens(self, room: float, device: Device, beside: int, most: int) -> int:
        """The largest micro-batch that fits; 0 where none does.

        Args:
            room: bytes.
            most: tokens, above which nobody asks; of one traced size nothing is known beyond it.
        """
        low, high = 0, most if len(self.points) > 1 else min(most, self.points[0].tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak(middle, device, beside) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def _at(self, tokens: int, sizes: Sequence[int]) -> float:
        known = list(zip([each.tokens for each in self.points], sizes, strict=True))
        if tokens <= known[0][0] or len(known) == 1:
            return known[0][1]
        last = known[-2:]
        for (start, low), (end, high) in [*pairwise(known), (last[0], last[1])]:
            if tokens <= end or end == known[-1][0]:
                return low + (high - low) * (tokens - start) / (end - start)
        raise AssertionError("the last pair serves all sizes beyond")


@dataclass(frozen=True)
class Growth:
    """How the peak of some settings grows."""

    in_rows: Curve
    """With more rows of the length that is asked for in a micro-batch."""
    in_length: Curve
    """With longer rows, one in a micro-batch or, where the batch stays whole, as many as there are."""
    asked: Sized
    """The rows that are asked for, one in a micro-batch or, where the batch stays whole, all of them."""
