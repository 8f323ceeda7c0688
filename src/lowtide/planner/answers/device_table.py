"""On which devices a run fits, and how: a few traces, asked of all devices.

A plan for each device would trace for minutes. Here each way to train is traced once for each kind of device (GPUs
with bfloat16, older ones, CPUs), with the rows that are asked for and with long ones; a device adds its allocator's
workspaces, its context and its rates. What lies between traced lengths is interpolated (`curves`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lowtide.planner.answers.curves import Growth
from lowtide.planner.answers.known_models import known_models, known_name
from lowtide.planner.answers.row_lengths import RowLengths
from lowtide.planner.answers.traces import LONG, Traces, has_budget, kind_of, traces_of
from lowtide.planner.answers.ways import PLAIN, Stage, Way
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.devices import DEVICES, GIB, Device
from lowtide.planner.estimate import BANDS
from lowtide.planner.tracing.described_model import DescribedModel

PROCESS = int(0.75 * GIB)
"""What a process holds on a CPU beside tensors; assumed, where it was not measured here before."""


@dataclass(frozen=True)
class Fit:
    """What is predicted of one way to train on one device."""

    way: str
    settings: Mapping[str, Any]
    """What to write, with which it is fastest."""
    peak_bytes: int
    room_bytes: int
    """What it may take of the device, with a part left for what the prediction may miss."""
    tokens_per_second: float | None
    longest_row: int | None
    """Tokens of a row, with `longest_settings`; 0 where none fits, None for a method whose policy writes."""
    longest_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the rows that were asked for fit."""
        return self.peak_bytes <= self.room_bytes


@dataclass(frozen=True)
class DeviceRow:
    """A device, and what fits there."""

    device: str
    kind: str
    memory_bytes: int
    fits: Mapping[str, Fit]
    """By way; those that do not fit are with the peak of their smallest settings."""


@dataclass(frozen=True)
class DeviceTable:
    """All devices, the smallest first."""

    method: str
    model: str
    parameters: int
    lengths: str
    rows: tuple[DeviceRow, ...]
    changes: Mapping[str, str | None]
    """By way, what it changes in the numbers."""
    notes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """By way, why it cannot be predicted."""

    def smallest(self, way: str | None = None) -> DeviceRow | None:
        """The first device on which a way fits, or any."""
        for row in self.rows:
            if any(each.fits for name, each in row.fits.items() if way in (None, name)):
                return row
        return None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        found = asdict(self)
        for made, row in zip(found["rows"], self.rows, strict=True):
            for name, fit in row.fits.items():
                made["fits"][name] |= {"fits": fit.fits}
        ways = list(self.changes)
        smallest = {way: row.device if (row := self.smallest(way)) else None for way in ways}
        return found | {"smallest": smallest}


def device_table(
    runs: Mapping[str, PlannedRun],
    lengths: RowLengths,
    *,
    model: str,
    beside: int | None = None,
    devices: Iterable[Device] = tuple(DEVICES.values()),
    seconds: float = math.inf,
    kept: Traces | None = None,
) -> DeviceTable:
    """Which devices hold a run.

    Args:
        runs: what is asked for, by kind of device (`KINDS`), each for a device of that kind.
        lengths: of its rows.
        model: its name.
        beside: what a process holds on a CPU beside tensors; None for an assumption.
        devices: to ask of.
        seconds: in which traces are begun; what they leave out is noted.
        kept: what is known without a trace, of some kinds of devices.
    """
    asked = [(device, kind_of(device)) for device in sorted(devices, key=as_bought)]
    first = runs[asked[0][1]]
    positions = getattr(first.described.get_text_config(), "max_position_embeddings", None) or LONG
    positions = max(positions * lengths.longest // lengths.sequence, lengths.longest)
    kinds = {kind: [each for each, of in asked if of == kind] for kind in dict.fromkeys(kind for _, kind in asked)}
    parameters = _parameters(first, model)
    there = {} if kept is None else kept.ways
    left = {kind: each for kind, each in kinds.items() if kind not in there}
    traced = traces_of(runs, lengths, left, positions, parameters, seconds)
    traced = traced if kept is None else kept.beside(traced)
    process = PROCESS if beside is None else beside
    return DeviceTable(
        method=first.method.name,
        model=model,
        parameters=parameters,
        lengths=str(lengths),
        rows=tuple(
            _row(device, kind, traced, Asked(lengths, positions, not has_budget(runs[kind])), process)
            for device, kind in asked
        ),
        changes={way.name: way.changes for way in traced.ways[asked[0][1]]},
        notes=traced.notes,
        refused=traced.refused,
    )


def as_bought(device: Device) -> tuple:
    """The order in which a person would look: GPUs before hosts, the smaller first, of one size the cheaper, which
    computes less."""
    flops = 0.0 if device.sheet is None else max(device.sheet.flops.values())
    return device.kind != "cuda", device.name.startswith("Apple"), round(device.memory_bytes / GIB / 4), flops


@dataclass(frozen=True)
class Asked:
    """The rows of a question."""

    lengths: RowLengths
    positions: int
    """Tokens that a row may have."""
    cuts: bool
    """Whether a batch is cut into as large micro-batches as fit; else they are as the user says."""


def _row(device: Device, kind: str, traced: Traces, asked: Asked, process: int) -> DeviceRow:
    beside = device.context_bytes if device.kind == "cuda" else process
    fits = {}
    for way in traced.ways[kind]:
        named = [(each, traced.growths.get((kind, way.name, each.name))) for each in way.stages]
        stages = [(stage, growth) for stage, growth in named if growth is not None]
        if stages:
            fits[way.name] = _fit(way, stages, device, beside, asked)
    return DeviceRow(device.name, device.kind, device.memory_bytes, fits)


def _fit(
    way: Way,
    stages: Sequence[tuple[Stage, Growth]],
    device: Device,
    beside: int,
    asked: Asked,
) -> Fit:
    room = int(device.memory_bytes / (1 + BANDS[device.kind]))
    possible: list[tuple[float, int, dict[str, Any], float | None]] = []
    longest: tuple[int | None, dict[str, Any]] = (0, {})
    for stage, growth in stages:
        first = growth.asked
        cuts = asked.cuts and not stage.whole
        whole = first.tokens * (first.micro_batches if cuts else 1)
        smallest = growth.in_rows.peak(first.tokens, device, beside)
        most = growth.in_rows.most_tokens(room, device, beside, whole)
        cut = max(most // first.tokens, 1) * first.tokens  # whole rows
        if smallest <= room and not stage.begins_with:
            timed = device.sheet is not None or device.timed
            speed = first.tokens_per_second(device, min(cut, whole)) if timed else None
            budget = {} if cut >= whole else {"tokens_per_microbatch": cut}
            peak = growth.in_rows.peak(cut, device, beside)
            possible.append((-(speed or 0), peak, {**stage.options, **budget}, speed))
        rows = asked.lengths.batch if stage.whole else 1
        row = growth.in_length.most_tokens(room, device, beside, asked.positions * rows) // rows
        if stage.name != PLAIN and row > (longest[0] or 0):
            longest = min(row, asked.positions), {**stage.options, **({"tokens_per_microbatch": row} if cuts else {})}
    if asked.lengths.method.writes is not None:
        longest = (None, {})
    written = dict(way.written)
    if possible:
        _, peak, settings, speed = min(possible, key=lambda each: each[0])
        return Fit(way.name, written | settings, peak, room, speed, longest[0], written | longest[1])
    least = [(each.in_rows.peak(each.asked.tokens, device, beside), stage, each.asked) for stage, each in stages]
    peak, stage, rows = min(least, key=lambda each: each[0])
    cut = peak <= room and asked.cuts and not stage.whole and rows.micro_batches > 1
    settings = {**stage.options, **({"tokens_per_microbatch": rows.tokens} if cut else {})}
    return Fit(way.name, written | settings, peak, room, None, longest[0], written | longest[1])


def _parameters(run: PlannedRun, model: str) -> int:
    known = known_name(model)
    if known is not None:
        return known_models()[known]["parameters"]
    made = DescribedModel(run.described, torch.float32, run.method.head)
    return sum(parameter.numel() for parameter in made.on_meta(made.layers).parameters())
