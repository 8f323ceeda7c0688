"""On which devices a run fits, and how: a few traces, asked of all devices.

A plan for each device would trace for minutes. Here each way to train is traced once for each kind of device (GPUs
with bfloat16, older ones, CPUs), with the rows that are asked for and with long ones; a device adds its allocator's
workspaces, its context and its rates. What lies between traced lengths is interpolated (`curves`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lowtide.planner.answers.curves import Curve
from lowtide.planner.answers.known_models import known_models, known_name
from lowtide.planner.answers.row_lengths import RowLengths
from lowtide.planner.answers.traces import LONG, Traces, kind_of, traces_of
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
) -> DeviceTable:
    """Which devices hold a run.

    Args:
        runs: what is asked for, by kind of device (`KINDS`), each for a device of that kind.
        lengths: of its rows.
        model: its name.
        beside: what a process holds on a CPU beside tensors; None for an assumption.
        devices: to ask of.
    """
    asked = [(device, kind_of(device)) for device in sorted(devices, key=as_bought)]
    first = runs["cuda"]
    positions = getattr(first.described.get_text_config(), "max_position_embeddings", None) or LONG
    positions = positions * lengths.longest // lengths.sequence
    kinds = {kind: [each for each, of in asked if of == kind] for kind in dict.fromkeys(kind for _, kind in asked)}
    parameters = _parameters(first, model)
    traced = traces_of(runs, lengths, kinds, positions, parameters)
    process = PROCESS if beside is None else beside
    return DeviceTable(
        method=first.method.name,
        model=model,
        parameters=parameters,
        lengths=str(lengths),
        rows=tuple(_row(device, kind, traced, lengths, process, positions) for device, kind in asked),
        changes={way.name: way.changes for way in traced.ways["cuda"]},
        notes=traced.notes,
        refused=traced.refused,
    )


def as_bought(device: Device) -> tuple:
    """The order in which a person would look: GPUs before hosts, the smaller first, of one size the cheaper, which
    computes less."""
    flops = 0.0 if device.sheet is None else max(device.sheet.flops.values())
    return device.kind != "cuda", device.name.startswith("Apple"), round(device.memory_bytes / GIB / 4), flops


def _row(
    device: Device,
    kind: str,
    traced: Traces,
    lengths: RowLengths,
    process: int,
    positions: int,
) -> DeviceRow:
    curves = traced.curves
    beside = device.context_bytes if device.kind == "cuda" else process
    fits = {}
    for way in traced.ways[kind]:
        stages = [(each, curves[key]) for each in way.stages if (key := (kind, way.name, each.name)) in curves]
        if stages:
            fits[way.name] = _fit(way, stages, device, beside, lengths, positions)
    return DeviceRow(device.name, device.kind, device.memory_bytes, fits)


def _fit(
    way: Way,
    stages: Sequence[tuple[Stage, Curve]],
    device: Device,
    beside: int,
    lengths: RowLengths,
    positions: int,
) -> Fit:
    room = int(device.memory_bytes / (1 + BANDS[device.kind]))
    possible: list[tuple[float, int, dict[str, Any], float | None]] = []
    longest: tuple[int | None, dict[str, Any]] = (0, {})
    for stage, curve in stages:
        first = curve.points[0]
        whole = first.tokens * (1 if stage.whole else first.micro_batches)
        smallest = curve.peak(first.tokens, device, beside)
        speed = None if device.sheet is None and not device.timed else first.tokens_per_second(device)
        most = curve.most_tokens(room, device, beside, max(whole, positions * (lengths.batch if stage.whole else 1)))
        cut = min(most, whole)
        if smallest <= room and not stage.begins_with:
            budget = {} if cut >= whole else {"tokens_per_microbatch": cut // 16 * 16 or cut}
            possible.append((-(speed or 0), curve.peak(cut, device, beside), {**stage.options, **budget}, speed))
        row = most // (lengths.batch if stage.whole else 1)
        if stage.name != PLAIN and row > (longest[0] or 0):
            longest = min(row, positions), {**stage.options, **({} if stage.whole else {"tokens_per_microbatch": row})}
    if lengths.method.writes is not None:
        longest = (None, {})
    written = dict(way.written)
    if possible:
        _, peak, settings, speed = min(possible, key=lambda each: each[0])
        return Fit(way.name, written | settings, peak, room, speed, longest[0], written | longest[1])
    stage, curve = min(stages, key=lambda each: each[1].peak(each[1].points[0].tokens, device, beside))
    peak = curve.peak(curve.points[0].tokens, device, beside)
    return Fit(way.name, written | dict(stage.options), peak, room, None, longest[0], written | longest[1])


def _parameters(run: PlannedRun, model: str) -> int:
    known = known_name(model)
    if known is not None:
        return known_models()[known]["parameters"]
    made = DescribedModel(run.described, torch.float32, run.method.head)
    return sum(parameter.numel() for parameter in made.on_meta(made.layers).parameters())
