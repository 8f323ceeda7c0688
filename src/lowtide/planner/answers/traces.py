"""The traces that answer for all lengths: each way to train, with the rows that are asked for and with long ones."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.planner.allocators.replay import peaks
from lowtide.planner.allocators.replay import run_of as events_of
from lowtide.planner.answers.curves import Curve, Growth, Point
from lowtide.planner.answers.row_lengths import BATCH, RowLengths
from lowtide.planner.answers.ways import Stage, Way, run_of, ways_of
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.devices import Device
from lowtide.planner.estimate import allocator_of
from lowtide.planner.parallel import counting_references, each_of

BUDGET = "tokens_per_microbatch"
LONG = 65_536
"""Tokens of the long rows that are traced, where the model has so many positions."""
ASKED, HALF, LONGER = "asked", "half of the rows", "longer"
"""The sizes that are traced: the rows that are asked for one by one, half of them in a micro-batch, longer ones."""
LEFT_OUT = {ASKED: "altogether", HALF: "with several rows in a micro-batch", LONGER: "with longer rows"}
DEVICES_OF = {"cuda": "GPUs with bfloat16", "older": "older GPUs", "cpu": "CPUs"}
LATE = "the time for traces ended before it: give more by --seconds, or ask for one device by --device"
"""In the place of a trace that was not begun."""
PIECES = 8
"""In how many pieces a token budget cuts the longest rows that are traced: what a piece adds is the same for each."""
KINDS = {"cuda": "H100-80GB", "older": "T4-16GB", "cpu": "CPU-64GB"}
"""Kinds of devices that are traced apart, each with one that stands for all of its kind."""


def kind_of(device: Device) -> str:
    """Which of `KINDS` a device is."""
    if device.kind != "cuda":
        return "cpu"
    return "cuda" if device.has_bf16 else "older"


@dataclass(frozen=True)
class Task:
    """One trace: settings of a way, on a kind of device, with some rows."""

    kind: str
    way: Way
    stage: Stage
    lengths: RowLengths
    rows: int | None = 1
    """Of a micro-batch; None: it is not cut here."""
    size: str = ASKED


@dataclass(frozen=True)
class Traces:
    """What was traced of some runs."""

    ways: Mapping[str, Sequence[Way]]
    """By kind of device."""
    growths: Mapping[tuple[str, str, str], Growth]
    """By kind, way and stage."""
    refused: Mapping[str, str]
    """By way, why it could not be traced on any kind."""
    notes: tuple[str, ...]

    def beside(self, others: Traces) -> Traces:
        """With those of other kinds of devices."""
        return Traces(
            {**self.ways, **others.ways},
            {**self.growths, **others.growths},
            {**self.refused, **others.refused},
            (*self.notes, *others.notes),
        )


def traces_of(
    runs: Mapping[str, PlannedRun],
    lengths: RowLengths,
    devices: Mapping[str, Sequence[Device]],
    positions: int,
    parameters: int,
    seconds: float = math.inf,
) -> Traces:
    """Traces all ways to train.

    Args:
        runs: what is asked for, by kind of device (`KINDS`), each for a device of that kind.
        lengths: of its rows.
        devices: by kind.
        positions: tokens that a row may have.
        parameters: of the model. Long rows are not traced where what holds these is more than any device has.
        seconds: in which traces are begun. Those of the rows that are asked for come first; what was left out is noted.
    """
    ways = {kind: ways_of(runs[kind]) for kind in devices}
    spaces = {kind: {each.workspaces for each in those} for kind, those in devices.items()}
    largest = {kind: max(each.memory_bytes for each in those) for kind, those in devices.items()}
    tasks = [
        task
        for kind in devices
        for way in ways[kind]
        for task in tasks_of(kind, way, lengths, _positions(runs[kind], positions), cuts=not has_budget(runs[kind]))
        if task.lengths is lengths or task.stage.least * parameters <= largest[kind]
    ]
    # Rows of one length have operations of one shape, of which a process keeps what they give.
    tasks.sort(key=lambda task: (task.size != ASKED, task.lengths.longest))
    until = time.monotonic() + seconds

    def trace(task: Task) -> Point | str:
        return LATE if time.monotonic() > until else _traced(task, runs[task.kind], spaces[task.kind])

    parts = [[task for task in tasks if (task.size == ASKED) is asked] for asked in (True, False)]
    traced = [found for part in parts for found in each_of(trace, part)]
    growths, refused = _growths(tasks, traced)
    notes = dict.fromkeys(note for each in traced if isinstance(each, Point) for note in each.notes)
    late = [task for task, found in zip(tasks, traced, strict=True) if found == LATE]
    return Traces(ways, growths, refused, (*notes, *_said_of(late, len(tasks), seconds)))


def _said_of(late: Sequence[Task], count: int, seconds: float) -> list[str]:
    """What was left out for want of time, in a sentence; nothing where all was traced."""
    if not late:
        return []
    left = dict.fromkeys(f"{task.way.name} {LEFT_OUT[task.size]} on {DEVICES_OF[task.kind]}" for task in late)
    return [
        f"{count - len(late)} of {count} traces were made in {seconds:g} s, which leaves out {', '.join(left)}: the "
        "longest row is then at most one that was traced. --seconds gives more time, and --device NAME asks for less."
    ]


def has_budget(run: PlannedRun) -> bool:
    """Whether a user says how many tokens a micro-batch has."""
    return run.requested.get(BUDGET) is not None


def _positions(run: PlannedRun, positions: int) -> int:
    """Tokens of the longest row that is traced, where a row may have so many: a few pieces, where it is cut."""
    return min(LONG, positions, PIECES * int(run.requested[BUDGET]) if has_budget(run) else LONG)


def tasks_of(kind: str, way: Way, lengths: RowLengths, positions: int, *, cuts: bool = True) -> list[Task]:
    """The traces of a way. Rows are cut into micro-batches of one, but where a stage needs the batch whole, or a user
    says how they are cut (`cuts` is False).

    Half of the rows in a micro-batch are traced where longer rows are not, and on older GPUs, whose attention takes
    memory by the square of a row: elsewhere longer rows say enough of several. What is half the batch still finds the
    gradients of another micro-batch.
    """
    long = lengths.of(positions)
    grows = long.longest >= 2 * lengths.longest and lengths.method.writes is None
    few = replace(long, lengths=long.lengths[:2]) if grows else None
    found = []
    for stage in way.stages:
        rows, longer = 1 if cuts and not stage.whole else None, few is not None and stage.long
        if not stage.begins_with:
            found.append(Task(kind, way, stage, lengths, rows))
            alone = not longer or kind == "older" or stage.grows_like is not None
            if alone and rows is not None and lengths.batch > 1:
                found.append(Task(kind, way, stage, lengths, max(lengths.batch // 2, 2), HALF))
        if few is not None and longer and stage.grows_like is None:
            found.append(Task(kind, way, stage, few, rows, LONGER))
    return found


def _traced(task: Task, asked: PlannedRun, spaces: set[tuple[int, ...]]) -> Point | str:
    """A trace, or why there is none."""
    try:
        run = run_of(asked, task.way)
        rows = min(task.lengths.batch, run.requested.get(BATCH, task.lengths.batch))
        run = replace(run, requested={**run.requested, BATCH: rows, "eval_strategy": "no"})
        budget = {} if task.rows is None else {BUDGET: task.rows * _computed(task, run)}
        return point_of(run, task.lengths, {**task.stage.options, **budget}, spaces)
    except ValueError as reason:
        return str(reason)


@counting_references()
def point_of(
    run: PlannedRun, lengths: RowLengths, options: Mapping[str, Any], spaces: Iterable[tuple[int, ...]]
) -> Point:
    """One trace, and what is held on devices whose libraries take such workspaces.

    Raises:
        ValueError: the run cannot be traced, with the reason.
    """
    fake = run.faked(lengths.rows(), options)
    traced = fake.traced(run.device)
    first, *_ = spaces = sorted(spaces, key=sum)
    allocator = allocator_of(fake, traced.events, run.device, first)
    held = peaks(events_of(traced.events, rehearsal=fake.rehearsal), allocator)
    # Larger workspaces add what they have more, but for the rounding of an allocator to some MiB.
    phases = {
        workspaces: {name: sum(each.values()) + sum(workspaces) - sum(first) for name, each in held.items()}
        for workspaces in spaces
    }
    costs = {name: (each.dispatched, each.host_bytes) for name, each in traced.costs.items()}
    return Point(traced.tokens, traced.micro_batches, traced.head_share, costs, phases, traced.notes)


def _computed(task: Task, run: PlannedRun) -> int:
    """The tokens that the longest row takes, which of a method that writes are more than its prompt's."""
    fake = run.faked(task.lengths.rows(), {BUDGET: None})
    counted = fake.assembled(run.device).row_lengths(fake.dataset)
    return task.lengths.longest if counted is None else int(counted.max())


def _growths(
    tasks: Sequence[Task], traced: Sequence[Point | str]
) -> tuple[dict[tuple[str, str, str], Growth], dict[str, str]]:
    """By kind, way and stage; and by way why it could not be traced."""
    points: dict[tuple[str, str, str], dict[str, Point]] = {}
    refused = {}
    for task, found in zip(tasks, traced, strict=True):
        if isinstance(found, str):
            refused[task.way.name] = found
        else:
            points.setdefault((task.kind, task.way.name, task.stage.name), {})[task.size] = found
    for task in tasks:
        key = task.kind, task.way.name, task.stage.name
        own = points.get(key, {})
        first = points.get((task.kind, task.way.name, task.stage.begins_with), {})
        if ASKED in first and LONGER in own:
            own.setdefault(ASKED, first[ASKED])
        like = points.get((task.kind, *task.stage.grows_like), {}) if task.stage.grows_like else {}
        for size in (HALF, LONGER):
            if ASKED in own and {ASKED, size} <= like.keys():
                own.setdefault(size, own[ASKED].grown(like[ASKED], like[size]))
    growths = {key: _growth(found) for key, found in points.items() if ASKED in found}
    known = {way for _, way, _ in growths}
    return growths, {way: why for way, why in refused.items() if way not in known}


def _growth(points: Mapping[str, Point]) -> Growth:
    """Of a few sizes; those that have no more tokens than the first say nothing, as where a budget is given."""
    first = points[ASKED]
    larger = {size: each for size, each in points.items() if each.tokens > first.tokens}
    rows, long = (Curve([first, *([larger[size]] if size in larger else [])]) for size in (HALF, LONGER))
    return Growth(rows if HALF in larger else long, long if LONGER in larger else rows, first)
