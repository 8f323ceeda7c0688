"""The traces that answer for all lengths: each way to train, with the rows that are asked for and with long ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.planner.allocators.cuda_allocator import CudaAllocator
from lowtide.planner.allocators.replay import peaks
from lowtide.planner.allocators.replay import run_of as events_of
from lowtide.planner.answers.curves import Curve, Point
from lowtide.planner.answers.row_lengths import RowLengths
from lowtide.planner.answers.ways import Stage, Way, run_of, ways_of
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.devices import Device
from lowtide.planner.estimate import heap_of
from lowtide.planner.parallel import each_of

BATCH, BUDGET = "per_device_train_batch_size", "tokens_per_microbatch"
LONG = 65_536
"""Tokens of the long rows that are traced, where the model has so many positions."""
KINDS = {"cuda": "H100-80GB", "older": "T4-16GB", "cpu": "CPU-64GB"}
"""Kinds of devices that are traced apart, each with one that stands for all of its kind."""


def kind_of(device: Device) -> str:
    """Which of `KINDS` a device is."""
    if device.kind != "cuda":
        return "cpu"
    return "cuda" if (device.capability or (0, 0)) >= (8, 0) else "older"


@dataclass(frozen=True)
class Task:
    """One trace: settings of a way, on a kind of device, with some rows."""

    kind: str
    way: Way
    stage: Stage
    lengths: RowLengths
    micro_batch: int | None


@dataclass(frozen=True)
class Traces:
    """What was traced of some runs."""

    ways: Mapping[str, Sequence[Way]]
    """By kind of device."""
    curves: Mapping[tuple[str, str, str], Curve]
    """By kind, way and stage."""
    refused: Mapping[str, str]
    """By way, why it could not be traced on any kind."""
    notes: tuple[str, ...]


def traces_of(
    runs: Mapping[str, PlannedRun],
    lengths: RowLengths,
    devices: Mapping[str, Sequence[Device]],
    positions: int,
    parameters: int,
) -> Traces:
    """Traces all ways to train.

    Args:
        runs: what is asked for, by kind of device (`KINDS`), each for a device of that kind.
        lengths: of its rows.
        devices: by kind.
        positions: tokens that a row may have.
        parameters: of the model. Long rows are not traced where what holds these is more than any device has.
    """
    ways = {kind: ways_of(runs[kind]) for kind in devices}
    spaces = {kind: {each.workspaces for each in those} for kind, those in devices.items()}
    largest = {kind: max(each.memory_bytes for each in those) for kind, those in devices.items()}
    tasks = [
        task
        for kind in devices
        for way in ways[kind]
        for task in tasks_of(kind, way, lengths, positions)
        if task.lengths is lengths or task.stage.least * parameters <= largest[kind]
    ]
    # Rows of one length have operations of one shape, of which a process keeps what they give.
    tasks.sort(key=lambda task: task.lengths.longest)
    traced = each_of(_tracing(runs, spaces), tasks)
    curves, refused = _curves(tasks, traced)
    notes = dict.fromkeys(note for each in traced if isinstance(each, Point) for note in each.notes)
    return Traces(ways, curves, refused, tuple(notes))


def tasks_of(kind: str, way: Way, lengths: RowLengths, positions: int) -> list[Task]:
    """The traces of a way. Rows are cut into micro-batches of one, but where a stage needs the batch whole."""
    long = lengths.of(min(LONG, positions))
    grows = long.longest >= 2 * lengths.longest and lengths.method.writes is None
    few = replace(long, lengths=long.lengths[:2]) if grows else None
    found = []
    for stage in way.stages:
        one = None if stage.whole else max(lengths.longest, 1)
        if not stage.begins_with:
            found.append(Task(kind, way, stage, lengths, one))
        if few is not None and stage.long and stage.grows_like is None:
            found.append(Task(kind, way, stage, few, None if stage.whole else few.longest))
    return found


def _tracing(
    runs: Mapping[str, PlannedRun], spaces: Mapping[str, set[tuple[int, ...]]]
) -> Callable[[Task], Point | str]:
    def trace(task: Task) -> Point | str:
        try:
            return _traced(task, runs[task.kind], spaces[task.kind])
        except ValueError as reason:
            return str(reason)

    return trace


def _traced(task: Task, asked: PlannedRun, spaces: set[tuple[int, ...]]) -> Point:
    run = run_of(asked, task.way)
    rows = min(task.lengths.batch, run.requested.get(BATCH, task.lengths.batch))
    run = replace(run, requested={**run.requested, BATCH: rows, "eval_strategy": "no"})
    cut = task.micro_batch is not None and run.requested.get(BUDGET) is None
    budget = {BUDGET: _computed(task, run)} if cut else {}
    return point_of(run, task.lengths, {**task.stage.options, **budget}, spaces)


def point_of(
    run: PlannedRun, lengths: RowLengths, options: Mapping[str, Any], spaces: Iterable[tuple[int, ...]]
) -> Point:
    """One trace, and what is held on devices whose libraries take such workspaces.

    Raises:
        ValueError: the run cannot be traced, with the reason.
    """
    fake = run.faked(lengths.rows(), options)
    traced = fake.traced(run.device)
    allocator = CudaAllocator() if run.device.kind == "cuda" else heap_of(fake)
    first, *_ = spaces = sorted(spaces, key=sum)
    for number, size in enumerate(first):
        allocator.born(("workspace", number), size)
    held = peaks(events_of(traced.events, rehearsal=fake.rehearsal), allocator)
    # Larger workspaces add what they have more, but for the rounding of an allocator to some MiB.
    phases = {
        workspaces: {name: sum(each.values()) + sum(workspaces) - sum(first) for name, each in held.items()}
        for workspaces in spaces
    }
    costs = {name: (each.operations, each.host_bytes) for name, each in traced.costs.items()}
    return Point(traced.tokens, traced.micro_batches, traced.head_share, costs, phases, traced.notes)


def _computed(task: Task, run: PlannedRun) -> int:
    """The tokens that the longest row takes, which of a method that writes are more than its prompt's."""
    fake = run.faked(task.lengths.rows(), {BUDGET: None})
    counted = fake.assembled(run.device).row_lengths(fake.dataset)
    return task.lengths.longest if counted is None else int(counted.max())


def _curves(
    tasks: Sequence[Task], traced: Sequence[Point | str]
) -> tuple[dict[tuple[str, str, str], Curve], dict[str, str]]:
    """By kind, way and stage; and by way why it could not be traced."""
    points: dict[tuple[str, str, str], list[Point]] = {}
    refused = {}
    for task, found in zip(tasks, traced, strict=True):
        key = (task.kind, task.way.name, task.stage.name)
        if isinstance(found, str):
            refused[task.way.name] = found
            continue
        points.setdefault(key, []).append(found)
    for task in tasks:
        stage, key = task.stage, (task.kind, task.way.name, task.stage.name)
        first = points.get((task.kind, task.way.name, stage.begins_with)) if stage.begins_with else None
        if first and key in points and len(points[key]) == 1:
            points[key] = [first[0], *points[key]]
        like = points.get((task.kind, *stage.grows_like)) if stage.grows_like else None
        if like and len(like) == 2 and key in points and len(points[key]) == 1:
            points[key].append(points[key][0].grown(*sorted(like, key=lambda each: each.tokens)))
    curves = {key: Curve(sorted(found, key=lambda each: each.tokens)) for key, found in points.items()}
    known = {way for _, way, _ in curves}
    return curves, {way: why for way, why in refused.items() if way not in known}
