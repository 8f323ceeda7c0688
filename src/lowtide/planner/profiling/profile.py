"""What a recorded run says of its memory: the peak and what it was made of, the largest tensors, what was predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowtide.memory.allocators.measure import bytes_text
from lowtide.own_files import write_output
from lowtide.planner.advice import Advice
from lowtide.planner.profiling.recording import CATEGORIES, Recording

POINTS = 600
"""Spans of the timeline that is kept."""
LARGEST = 10


@dataclass(frozen=True)
class ProfiledRun:
    """What was run, in words and numbers of its own."""

    method: str
    model: str
    device: str
    torch: str
    steps: int
    process_bytes: int
    """The peak of what holds the tensors: the process's resident memory on a CPU, with imports and the heap's holes;
    what the allocator reserved on CUDA, with its cache."""


@dataclass(frozen=True)
class Span:
    """A phase from its beginning to its end."""

    start: float
    end: float
    step: int
    """0 before the first."""
    phase: str


@dataclass(frozen=True)
class Tensors:
    """Tensors at the peak that are alike: of one line, shape and kind."""

    bytes: int
    """Of one of them."""
    count: int
    shape: tuple[int, ...] | None
    dtype: str | None
    category: str
    phase: str
    made: str
    line: str


@dataclass(frozen=True)
class Profile:
    """The memory of some steps."""

    run: ProfiledRun
    peak_bytes: int
    """Of tensors."""
    peak_seconds: float
    peak_step: int
    peak_phase: str
    phases: Mapping[str, Mapping[str, int]]
    """For each phase, the bytes by category when it held most."""
    seconds: Sequence[float]
    """[points]: where equal spans of the timeline begin."""
    bytes: Mapping[str, Sequence[int]]
    """By category, [points] each: when most was held in a span."""
    spans: Sequence[Span]
    tensors: Sequence[Tensors]
    """The largest at the peak, largest first."""
    predicted: Mapping[str, Mapping[str, int]] | None = None
    """As `phases`, of an estimate: tensors alone."""
    predicted_process_bytes: int | None = None
    """What an estimate says of `ProfiledRun.process_bytes`."""
    not_predicted: str = ""
    """Why there is no prediction."""
    advice: Sequence[Advice] = ()

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes by category."""
        return self.phases[self.peak_phase]

    @property
    def predicted_phase(self) -> str | None:
        """In which the predicted peak falls."""
        phases = self.predicted or {}
        return max(phases, key=lambda phase: sum(phases[phase].values()), default=None)

    @property
    def largest_category(self) -> str:
        """The one that holds most at the peak."""
        return max(self.at_peak, key=lambda name: self.at_peak[name])

    @property
    def predicted_bytes(self) -> int | None:
        """The predicted peak of tensors."""
        return max((sum(sizes.values()) for sizes in (self.predicted or {}).values()), default=None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"predicted_bytes": self.predicted_bytes, "predicted_phase": self.predicted_phase}

    def write_json(self, path: Path) -> None:
        """Write it to a file."""
        write_output(path, json.dumps(self.to_dict(), indent=1) + "\n")


def profile_of(recording: Recording, run: ProfiledRun) -> Profile:
    """A recording's profile, without prediction and advice."""
    levels = recording.levels()
    peak = levels.peak
    mark = recording.marks[levels.mark[peak]]
    seconds, points = levels.held(POINTS)
    return Profile(
        run=run,
        peak_bytes=int(levels.total[peak]),
        peak_seconds=float(levels.seconds[peak]),
        peak_step=mark.step,
        peak_phase=mark.phase,
        phases=recording.phases(levels),
        seconds=[round(value, 6) for value in seconds.tolist()],
        bytes={
            name: levels.bytes[points, number].tolist()
            for number, name in enumerate(CATEGORIES)
            if levels.bytes[:, number].any()
        },
        spans=_spans(recording),
        tensors=_largest(recording, peak),
    )


def totals(profile: Profile) -> dict[str, str]:
    """What was predicted of the tensors, what held them, and what was predicted of that: as texts, by name."""
    holder = "process" if profile.run.device == "cpu" else "allocator"
    found = {f"{holder} at most": bytes_text(profile.run.process_bytes)}
    if profile.predicted_bytes is not None:
        found = {"tensors predicted": compared(profile.predicted_bytes, profile.peak_bytes)} | found
    if profile.predicted_process_bytes is not None:
        found[f"{holder} predicted"] = compared(profile.predicted_process_bytes, profile.run.process_bytes)
    return found


def compared(bytes: int, other: int) -> str:
    """Some bytes, and by which share of the other ones they are more."""
    return f"{bytes_text(bytes)} ({bytes / max(other, 1) - 1:+.1%})"


def ticks(most: int) -> dict[str, float]:
    """Round numbers of bytes up to a largest one, by their text."""
    units = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
    unit, name = next(((1 << bits, name) for bits, name in units if most >= 1 << bits), (1, "B"))
    power = 10.0 ** math.floor(math.log10(max(most / unit / 5, 1e-9)))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= most / unit / 5)
    return {f"{step * n:g} {name}": step * n * unit for n in range(6) if step * n * unit <= most}


def _spans(recording: Recording) -> list[Span]:
    """The phases one after the other; those of no time are left out, and those that go on are one."""
    found: list[Span] = []
    ends = [*(mark.seconds for mark in recording.marks[1:]), recording.seconds[-1]]
    for mark, end in zip(recording.marks, ends, strict=True):
        if found and (found[-1].step, found[-1].phase) == (mark.step, mark.phase):
            found[-1] = Span(found[-1].start, end, mark.step, mark.phase)
        elif end > mark.seconds:
            found.append(Span(mark.seconds, end, mark.step, mark.phase))
    return found


def _largest(recording: Recording, event: int) -> list[Tensors]:
    alike: dict[Tensors, int] = {}
    for size, block in recording.living(event):
        one = Tensors(size, 1, block.shape, block.dtype, block.category, block.phase, block.made, block.line)
        alike[one] = alike.get(one, 0) + 1
        if len(alike) > 4 * LARGEST:
            break
    kinds = [Tensors(**{**vars(one), "count": count}) for one, count in alike.items()]
    return kinds[:LARGEST]
