"""The grid that was traced beforehand, of which both the page of devices and `lowtide gpus` speak.

`page_grid.json` (written by `python -m bench.page_grid`) has for each well-known model, method and setting what each
phase holds at two sizes of a micro-batch, and the seconds of three sizes on each GPU with bfloat16. What is asked of
other models, options and devices is traced.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Any

from lowtide.planner.answers.curves import Curve, Growth
from lowtide.planner.answers.known_models import known_name
from lowtide.planner.answers.row_lengths import BATCH, RowLengths, row_lengths
from lowtide.planner.answers.traces import Traces, kind_of
from lowtide.planner.answers.ways import Stage, ways_of
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.devices import DEVICES, Device

GRID = "page_grid.json"
KIND = "cuda"
"""The kind of devices that it has."""
MIB = 1 << 20


@functools.cache
def grid() -> dict[str, Any]:
    """What was traced beforehand."""
    return json.loads(files("lowtide.planner.answers").joinpath(GRID).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class KeptPoint:
    """A size of a micro-batch, as a `Point` is, of which memory and time are known and nothing else."""

    tokens: int
    micro_batches: int
    phases: Mapping[tuple[int, ...], Mapping[str, int]]
    timing: Timing

    def tokens_per_second(self, device: Device, tokens: int | None = None) -> float:
        """By a roofline, on one device of the grid.

        Args:
            device: one that the grid has.
            tokens: of a micro-batch, of which there are the fewer; as this one has by default.
        """
        batch = self.tokens * self.micro_batches
        return batch / self.timing.seconds(device, tokens or self.tokens, batch)


@dataclass(frozen=True)
class Timing:
    """How long some settings take, with a line between timed sizes; below the smallest as long as that takes."""

    sizes: Sequence[int]
    """Tokens of the micro-batches that are timed."""
    milliseconds: Mapping[str, Sequence[float]]
    """By device, those of each size, of the attention of the largest, and of what a step does once."""
    longer: float
    """How many times as long rows are as those that were traced: attention takes so many times as long."""

    def seconds(self, device: Device, tokens: int, batch: int) -> float:
        """Of a step of so many tokens, in micro-batches of so many."""
        *timed, attention, once = self.milliseconds[device.name]
        known = list(zip(self.sizes, timed, strict=True))
        low, high = next((pair for pair in pairwise(known) if tokens <= pair[1][0]), known[-2:])
        share = max(0.0, (tokens - low[0]) / (high[0] - low[0]))
        alone = low[1] + share * (high[1] - low[1]) + attention * tokens / self.sizes[-1] * (self.longer - 1)
        return (alone * batch / tokens + once) / 1000


def kept_traces(run: PlannedRun, model: str, lengths: RowLengths, devices: Iterable[Device]) -> Traces | None:
    """What the grid says of a run on its kind of devices; None where it is of another model, method, option, device or
    kind of rows."""
    found, method, name = grid(), run.method.name, known_name(model)
    shape = found["models"].get(name)
    named = {each["name"] for each in found["devices"]}
    there = all(each.name in named and each == DEVICES[each.name] for each in devices if kind_of(each) == KIND)
    if shape is None or not there or method not in found["peaks"].get(shape, {}) or not _plain(run, lengths):
        return None
    peaks, times = found["peaks"][shape][method], found["seconds"][shape][method]
    ways = ways_of(run)
    growths = {
        (KIND, way.name, stage.name): _growth(found, method, stage, lengths, peaks[_key(stage)], times.get(_key(stage)))
        for way in ways
        for stage in way.stages
    }
    return Traces({KIND: ways}, growths, {}, (said(found),))


def said(found: Mapping[str, Any]) -> str:
    """Where the numbers of GPUs come from, in a sentence."""
    return (
        f"GPUs with bfloat16: traced beforehand ({found['date']}), as the page of devices has it (lowtide page), with "
        f"rows of {found['row']:,} tokens; longer rows are taken to hold as much as so many tokens in several rows. "
        "--trace traces your rows."
    )


def _plain(run: PlannedRun, lengths: RowLengths) -> bool:
    """Whether nothing is asked for but a number of rows of one length, cut into their parts as the grid's are."""
    usual = row_lengths(f"{lengths.sequence}x{lengths.batch}", run.method)
    alone = run.peft_config is None and run.quantization_config is None
    return alone and run.requested == {BATCH: lengths.batch} and lengths == usual


def _key(stage: Stage) -> str:
    """Of settings, in the grid."""
    return f"{stage.way} {stage.name}"


def _growth(found: Mapping[str, Any], method: str, stage: Stage, lengths: RowLengths, lines: Any, times: Any) -> Growth:
    devices = [DEVICES[each["name"]] for each in found["devices"]]
    by_device = {} if times is None else dict(zip((each.name for each in devices), times, strict=True))
    timing = Timing(found["timed"][method], by_device, lengths.sequence / found["row"])

    def point(tokens: int, micro_batches: int, held: Sequence[int]) -> KeptPoint:
        phases = {str(number): size * MIB for number, size in enumerate(held)}
        return KeptPoint(tokens, micro_batches, {each.workspaces: phases for each in devices}, timing)

    sizes = found["tokens"][method]
    curve = Curve([point(size, 1, [line[k] for line in lines]) for k, size in enumerate(sizes)])
    asked = (lengths.longest * lengths.batch, 1) if stage.whole else (lengths.longest, lengths.batch)
    return Growth(curve, curve, point(*asked, ()))
