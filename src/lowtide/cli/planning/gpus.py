"""`lowtide gpus dpo --model M`: on which devices a model can be trained, and how; from its config alone. With
`--device 4090` what that one holds, in one screen; `lowtide gpus --device 4090` says it of all built-in models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide.cli.endings import DOES_NOT_FIT, UsageError
from lowtide.cli.options import words_of
from lowtide.cli.planning.described_run import DescribedRun, add_lengths, described_run, noted, plain_table
from lowtide.cli.training import train
from lowtide.compat.argparse import Subparsers
from lowtide.process.deferred_imports import without_collection

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowtide.planner.answers.device_table import DeviceRow, DeviceTable, Fit

LENGTHS = "1024x8"
"""Of the rows, where nobody says which."""
SECONDS = 40
"""For traces: with imports and the last traces, all of it is within a minute on two cores."""


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "List the devices on which a model can be trained, the smallest first: all weights, LoRA, QLoRA, each with its "
        "settings, predicted peak, speed and longest row. Needs the model's config alone; well-known ones are built "
        "in. With --device what one device holds, in one screen; without a method, fine-tuning of all built-in models."
    )
    own, group = train.add_command(subparsers, "gpus", method, description, needs_method=False)
    named = "of this one alone, in one screen: 4090, H100-80GB, cuda (the one here)"
    if group is None:
        own.add_argument("--device", dest="of_device", metavar="NAME", required=True, help="a GPU with bfloat16: 4090")
        own.set_defaults(run=run_of_all)
    else:
        group.add_argument("--device", dest="of_device", metavar="NAME", help=named)
        add_lengths(group, LENGTHS)
        group.add_argument(
            "--seconds", type=_seconds, default=SECONDS, metavar="N", help=f"trace for so long (default: {SECONDS})"
        )
        group.add_argument("--trace", action="store_true", help="trace your rows, also where the page's grid has them")
        own.set_defaults(run=run)
    (group or own).add_argument("--json", action="store_true", help="print JSON")
    return own


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """List the devices; the exit status is 1 where there is none.

    Raises:
        ValueError, OSError: an argument, a file or the model is wrong; the message says which, and what to do.
    """
    from lowtide.planner.devices import device_named

    if arguments.of_device not in (None, "cuda"):
        device_named(arguments.of_device)
    described = described_run(arguments)
    if described.run.what.dataset or described.run.what.datasets:
        raise UsageError("gpus reads no dataset: say how long its rows are by --lengths 1024x8")
    with without_collection():
        from lowtide.planning import gpus
        from lowtide.terminal import Console

    with Console(stderr=True).status("Tracing the ways to train on tensors without memory"):
        found = gpus(
            described.method,
            described.model,
            device=arguments.of_device,
            seconds=arguments.seconds,
            trace=arguments.trace,
            **described.inputs(),
        )
    if found.changes.keys() <= found.refused.keys():
        raise ValueError(f"no way to train can be predicted: {next(iter(found.refused.values()))}")
    status = 0 if found.smallest() else DOES_NOT_FIT
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2, default=str))
        return status
    console = Console()
    for part in _parts(found, described) if arguments.of_device is None else _parts_of_one(found, described):
        console.print(part)
    return status


def run_of_all(arguments: argparse.Namespace) -> int:
    """Say what one GPU holds of all built-in models; the exit status is 1 where it holds none.

    Raises:
        ValueError: there is no such GPU, or the grid does not have it.
    """
    from lowtide.planner.devices import device_named

    name = device_named(arguments.of_device).name
    with without_collection():
        from lowtide.planner.answers.kept_grid import grid
        from lowtide.planner.answers.known_models import known_models
        from lowtide.planning import gpus
        from lowtide.terminal import Console

    there = [each["name"] for each in grid()["devices"]]
    if name not in there:
        raise UsageError(
            f"without a method gpus says what a GPU with bfloat16 holds ({', '.join(there)}), and {name} is none of "
            f"them: lowtide gpus sft --model M --device {arguments.of_device}"
        )
    shapes = grid()["peaks"]
    tables = [gpus("sft", model, device=name) for model in known_models() if grid()["models"][model] in shapes]
    tables.sort(key=lambda table: table.parameters)
    held = [table for table in tables if table.smallest()]
    if arguments.json:
        print(json.dumps([table.to_dict() for table in tables], indent=2, default=str))
    else:
        console = Console()
        for part in _parts_of_all(tables, held, arguments.of_device):
            console.print(part)
    return 0 if held else DOES_NOT_FIT


def _parts_of_all(tables: Sequence[DeviceTable], held: Sequence[DeviceTable], device: str) -> list[RenderableType]:
    """A line a model that one GPU holds, and the names of the others."""
    from rich.text import Text

    (row,), ways = tables[0].rows, list(tables[0].changes)
    made = plain_table(f"Peak, of {_gib(row.memory_bytes)} GiB, and the longest row (k: 1,024 tokens)")
    made.add_column("model", no_wrap=True)
    for way in ways:
        made.add_column(way, justify="right", no_wrap=True)
    for table in held:
        fits = [table.rows[0].fits[way] for way in ways]
        cells = (
            f"{fit.peak_bytes / (1 << 30):.1f} {_thousands(fit.longest_row or 0):>5}" if fit.fits else "no"
            for fit in fits
        )
        made.add_row(table.model.split("/")[-1], *cells)
    about = f"sft of the built-in models, {tables[0].lengths}, on {row.device}"
    others = ", ".join(table.model.split("/")[-1] for table in tables if table not in held)
    return [
        Text(""),
        Text(about, style="bold"),
        made,
        *([noted(f"It holds none of {others} as one device.")] if others else []),
        Text(f"Settings and speed of one: lowtide gpus sft --model {held[-1].model if held else 'M'} --device {device}",
             style="bold"),
        *(noted(note) for note in (ONE_DEVICE.rpartition(" All devices")[0], *tables[0].notes)),
    ]  # fmt: skip


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _parts_of_one(table: DeviceTable, described: DescribedRun) -> list[RenderableType]:
    """What one device holds: a line a way, and what to type for each."""
    from rich.text import Text

    (row,) = table.rows
    parts: list[RenderableType] = [Text(""), Text(f"{_about(table)}, on {row.device}", style="bold")]
    made = plain_table(f"{_gib(row.memory_bytes)} GiB")
    for name in ("way", "peak GiB", "fits", "tokens/s", "longest row"):
        made.add_column(name, justify="left" if name in ("way", "fits") else "right", no_wrap=True)
    for way, fit in row.fits.items():
        speed = "-" if fit.tokens_per_second is None else f"{fit.tokens_per_second:,.0f}"
        longest = "-" if fit.longest_row is None else f"{fit.longest_row:,}"
        style = "bold green" if fit.fits else "red"
        made.add_row(way, _gib(fit.peak_bytes), "yes" if fit.fits else "no", speed, longest, style=style)
    parts.append(made)
    for way in table.changes:
        if way in table.refused:
            parts.append(noted(f"{way} cannot be predicted: {table.refused[way]}"))
    fitting = [fit for fit in row.fits.values() if fit.fits]
    if fitting:
        line = f"{_command(described, replace(fitting[0], settings={}))} (DATA stands for your rows), and of a way:"
        parts += [Text(line, style="bold"), _settings_of(fitting)]
    return [*parts, *(noted(note) for note in (ONE_DEVICE, *table.notes))]


def _settings_of(fits: Sequence[Fit]) -> RenderableType:
    """What is typed for each way, and for its longest row where that is more than another token budget."""
    from rich.table import Table

    made = Table.grid(padding=(0, 1))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for fit in fits:
        made.add_row(fit.way, _written(fit.settings))
        if fit.longest_row and {**fit.longest_settings, BUDGET: 0} != {**fit.settings, BUDGET: 0}:
            made.add_row("  longest row", _written(fit.longest_settings))
    return made


ONE_DEVICE = (
    "Predicted from traces of a step without weights; 5% of a device (on a CPU 6%) is left for what that may miss. "
    "Speeds are a roofline at the rates of data sheets, for an order of magnitude. "
    "All devices: the same without --device."
)


def _parts(table: DeviceTable, described: DescribedRun) -> list[RenderableType]:
    from rich.text import Text

    keys: dict[str, int] = {}
    parts: list[RenderableType] = [Text(""), Text(_about(table), style="bold")]
    for way in table.changes:
        if way in table.refused:
            parts += [Text(""), Text(f"{way}: cannot be predicted: {table.refused[way]}", style="yellow")]
            continue
        parts += [Text(""), *_way(table, way, keys)]
    parts.append(Text("\nSettings"))
    parts += [_numbered(number, settings) for settings, number in keys.items()]
    parts += [Text(""), *(noted(note) for note in (*_assumptions(table), *table.notes))]
    parts += _next(table, described)
    return parts


def _about(table: DeviceTable) -> str:
    return f"{table.method} of {table.model} ({table.parameters / 1e9:.3g}B parameters), {table.lengths}"


def _way(table: DeviceTable, way: str, keys: dict[str, int]) -> list[RenderableType]:
    """One way's devices that hold it; of machines that differ in memory alone the smallest."""
    from rich.text import Text

    there = [row for row in table.rows if way in row.fits and row.fits[way].fits]
    shown = [row for row in there if row.kind == "cuda"]
    shown += [next((row for row in there if row.device.startswith(name)), None) for name in ("CPU", "Apple")]  # type: ignore[list-item]
    if not there:
        needs = min((row.fits[way].peak_bytes for row in table.rows if way in row.fits), default=0)
        return [Text.assemble((way, "bold"), f": fits none of them; {_takes(needs)}")]
    smallest = there[0]
    made = plain_table(f"{way}: from {smallest.device} on")
    for name in ("device", "peak GiB", "of GiB", "tokens/s", "longest row", "settings"):
        made.add_column(name, justify="left" if name == "device" else "right", no_wrap=True)
    for row in filter(None, shown):
        made.add_row(*_cells(row, row.fits[way], keys), style="bold green" if row is smallest else None)
    without = [row for row in table.rows if row.kind == "cuda" and row not in there and way in row.fits]
    parts: list[RenderableType] = [made]
    if without:
        takes = _takes(without[-1].fits[way].peak_bytes)
        parts.append(noted(f"Does not fit {', '.join(row.device for row in without)}: {takes}."))
    if table.changes[way]:
        what = "what is trained" if way in ADAPTED else "the numbers"
        parts.append(noted(f"It changes {what}: {table.changes[way]}."))
    return parts


ADAPTED = ("LoRA", "QLoRA")
BUDGET = "tokens_per_microbatch"


def _cells(row: DeviceRow, fit: Fit, keys: dict[str, int]) -> Sequence[str]:
    number, longest = _key_of(fit.settings, keys), "-"
    if fit.longest_row is not None:
        longest = f"{fit.longest_row:,} [{_key_of(fit.longest_settings, keys)}]"
    cut = fit.settings.get(BUDGET)
    larger = "" if row.kind == "cuda" else " and larger"
    speed = "-" if fit.tokens_per_second is None else f"{fit.tokens_per_second:,.0f}"
    setting = f"[{number}]" if cut is None else f"{cut:,} [{number}]"
    return f"{row.device}{larger}", _gib(fit.peak_bytes), _gib(row.memory_bytes), speed, longest, setting


def _key_of(settings: Mapping[str, Any], keys: dict[str, int]) -> int:
    """The number of some settings, but for the tokens of a micro-batch, which stand before it."""
    rest = {name: value for name, value in settings.items() if name != BUDGET}
    return keys.setdefault(_written(rest), len(keys) + 1)


def _written(settings: Mapping[str, Any]) -> str:
    """As a command line has them."""
    words = []
    for name, value in settings.items():
        words.append(f"--{name}" if value is True else f"--{name} {str(value).lower() if value is False else value}")
    return " ".join(words) or "the defaults"


def _numbered(number: int, settings: str) -> RenderableType:
    from rich.table import Table

    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(f"[{number}]".replace("[", "\\["), settings)
    return line


def _gib(size: int) -> str:
    """As many digits as the other commands show, without the unit, which is in the column's head."""
    return f"{size / (1 << 30):,.2f}"


def _takes(least: int) -> str:
    """What the smallest settings take, and why a device that has as much may still be too small."""
    from lowtide.memory.allocators.measure import bytes_text
    from lowtide.planner.estimate import BANDS

    left = f"{BANDS['cuda']:.0%} of a device (on a CPU {BANDS['cpu']:.0%})"
    return f"it takes {bytes_text(least)} at least, and {left} is left for what the prediction may miss"


def _assumptions(table: DeviceTable) -> list[str]:
    return [
        f"A number before settings is their --{BUDGET}, and the longest row is one with as large a budget.",
        "All of this is predicted, from traces of a step without weights; a part of each device is left for what that "
        "may miss (5%, on a CPU 6%). The longest row is interpolated between traced lengths, and is at most what the "
        "model has positions for. Speeds are a roofline at the rates of data sheets, for an order of magnitude.",
        "A row has all tokens of its parts. Mixed precision in bfloat16 (float16 on a T4 and V100). CPU and Apple are "
        "planned for as a CPU; what Metal keeps beside tensors is not modelled.",
    ]


def _next(table: DeviceTable, described: DescribedRun) -> list[RenderableType]:
    """What to type next, for the smallest device."""
    from rich.text import Text

    smallest = table.smallest()
    if smallest is None:
        return [Text("No device of the table holds it: take a smaller model, shorter rows, or several GPUs "
                     f"(lowtide plan {table.method} --devices 8xH100 ...).", style="bold red")]  # fmt: skip
    fit = next(each for each in smallest.fits.values() if each.fits)
    line = f"The smallest that works is {smallest.device}, with {fit.way} (DATA stands for your rows): "
    return [Text(""), Text(line + _command(described, fit), style="bold")]


def _command(described: DescribedRun, fit: Fit) -> str:
    """What trains with the settings of a fit, the user's own options and those that `--lengths` stands for."""
    own = {name: value for name, value in described.written().items() if name not in ("model", *fit.settings)}
    values = {"model": described.model, "dataset": "DATA", **own, **fit.settings}
    taken = train.options_of_command(described.method).options
    return " ".join(["lowtide", described.method, *words_of(values, taken)])
