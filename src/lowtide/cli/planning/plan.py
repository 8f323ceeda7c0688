"""`lowtide plan dpo --model M --dataset D --budget 24GiB`: the fastest settings that fit, as a run file."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.endings import DOES_NOT_FIT, UsageError
from lowtide.cli.planning.described_run import (
    DescribedRun,
    add_description,
    described_run,
    device_of,
    noted,
    of_the_start,
    plain_table,
    style_of,
)
from lowtide.compat.argparse import Subparsers
from lowtide.own_files import write_output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from lowtide.planner.plan import Plan, PlanError, Spread
    from lowtide.planner.sharding.step_time import StepTime


OTHERS = ("trl", "axolotl", "llama-factory", "unsloth")
"""Trainers whose settings a plan can be written in."""


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "Choose the fastest settings of a run that fit a memory budget, before any weight is loaded. "
        "Takes the options that `lowtide METHOD` takes; those that you give are kept as they are."
    )
    own, group = add_description(subparsers, "plan", method, description)
    if group is not None:
        group.add_argument(
            "--budget", metavar="SIZE", help="24GiB, 24GB, 24g, bytes, or auto: what the device has free"
        )
        devices = "GPUs of one node, 8xH100 say, in place of --device: how they share the run is chosen too"
        group.add_argument("--devices", metavar="NxNAME", help=devices)
        group.add_argument("--nodes", metavar="N", type=int, help="nodes that have so many --devices each (default: 1)")
        group.add_argument(
            "--host_memory", metavar="SIZE", help="of each node (default: 256 GiB for each of its --devices)"
        )
        group.add_argument("--lossy", action="store_true", help="choose settings that change the numbers too, named")
        trainers = f"write the settings for another trainer, with what it lacks: {', '.join(OTHERS)}"
        group.add_argument("--for", dest="other", metavar="TRAINER", choices=OTHERS, help=trainers)
        group.add_argument(
            "--output", type=Path, metavar="FILE", help="write the run file here, in place of printing it"
        )
    own.set_defaults(run=run)
    return own


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show the plan; the exit status is 1 where nothing fits.

    Raises:
        ValueError, OSError: an argument, a file or the model is wrong; the message says which, and what to do.
    """
    if arguments.devices and arguments.device:
        raise UsageError("--devices and --device both say where: leave one of them out")
    if arguments.output is not None and arguments.output.is_dir():
        raise UsageError(f"--output {arguments.output} is a folder: name a file")
    if arguments.other is not None:
        from lowtide.planner.answers.elsewhere import check_method

        check_method(arguments.other, arguments.method)
    described = described_run(arguments)
    from lowtide.planner.plan import PlanError

    try:
        found = _planned(arguments, described)
    except PlanError as error:
        _show_failure(error, as_json=arguments.json)
        return DOES_NOT_FIT
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_output(arguments.output, _written(found, arguments))
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    _show(found, arguments)
    return 0


def _planned(arguments: argparse.Namespace, described: DescribedRun) -> Plan:
    from lowtide.planner.tracing_process import tracing_here
    from lowtide.planning import plan
    from lowtide.terminal import Console

    with Console(stderr=True).status("Tracing the run on tensors without memory"), tracing_here():
        found = plan(
            described.method,
            described.model,
            budget=arguments.budget or described.values.get("memory_budget"),
            device=device_of(arguments),
            devices=arguments.devices,
            nodes=1 if arguments.nodes is None else arguments.nodes,
            host_memory=arguments.host_memory,
            exact=not arguments.lossy,
            **described.inputs(),
        )
    # The run file is to have all that was asked for: model, data and adapters too.
    return dataclasses.replace(found, requested=described.written())


def _written(plan: Plan, arguments: argparse.Namespace) -> str:
    """The run file: lowtide's, or that of another trainer."""
    if arguments.other is None:
        return plan.to_yaml()
    from lowtide.planner.answers.elsewhere import settings_for

    return settings_for(arguments.other, plan, None if arguments.output is None else str(arguments.output))


def _show(plan: Plan, arguments: argparse.Namespace) -> None:
    from lowtide.terminal import Console

    console = Console()
    for part in _parts(plan):
        console.print(part)
    if arguments.output is None:
        text = _written(plan, arguments).rstrip()
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif arguments.other is None:
        where = "" if plan.names_rows else " (DATA stands for your rows)"
        command = plan.launch(str(arguments.output))
        console.print(f"Written: {arguments.output}. This runs it{where}: {command}", markup=False, soft_wrap=True)
    else:
        console.print(f"Written: {arguments.output}, for {arguments.other}.", markup=False, soft_wrap=True)


def _show_failure(error: PlanError, *, as_json: bool) -> None:
    """What does not fit, and the ways out."""
    if as_json:
        print(json.dumps(error.to_dict(), indent=2))
        return
    from rich.padding import Padding

    from lowtide.terminal import Console

    console = Console()
    console.print(noted(""), noted(f"Does not fit: {error.reason}", style=style_of(False)))
    if error.ways:
        console.print(noted("Ways out:", style=""))
    for way in error.ways:
        console.print(Padding(noted(f"- {way}", style=""), (0, 2)))


def _parts(plan: Plan) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    from lowtide.memory.allocators.measure import bytes_text

    share, spread = plan.chosen.peak_bytes / plan.budget_bytes, plan.spread
    rate = plan.chosen.tokens_per_second
    peak = Text.assemble(
        ("Fits: ", style_of(True)),
        (f"{bytes_text(plan.chosen.peak_bytes)} ", "bold"),
        f"of {bytes_text(plan.budget_bytes)} on {'each ' if spread else ''}{plan.device} ({share:.0%}), "
        f"{bytes_text(plan.budget_bytes - plan.chosen.peak_bytes)} left, in {plan.estimate.phase}",
        f"; some {rate:,.0f} tokens/s{' of all devices' if spread else ''}" if rate else "",
    )
    parts: list[RenderableType] = [Text(""), peak]
    if spread is not None:
        parts = [Text(""), Text(f"{spread.cluster}: {plan.chosen.way}", style="bold"), peak]
        parts += [Text(line) for line in _over_devices(spread, plan.estimate.time)]
    parts += [Text(f"not exact: {change}", style="yellow") for change in plan.chosen.changes]
    parts.append(_settings_table(plan))
    if plan.techniques:
        parts.append(_effects_table(plan))
    parts += [Padding(noted(f"{name} cannot work here: {why}"), (0, 2)) for name, why in plan.refused.items()]
    parts += map(noted, (*of_the_start(plan.estimate), *plan.estimate.assumptions, *plan.notes))
    if plan.speed_by != "roofline":
        parts.append(noted("Speeds are relative, from operations counted; no device was measured."))
    return parts


def _over_devices(spread: Spread, time: StepTime | None) -> list[str]:
    """What is predicted of all devices together."""
    from lowtide.memory.allocators.measure import bytes_text

    of_node = " of each node" if spread.cluster.nodes > 1 else ""
    training = f"{bytes_text(spread.host_bytes)} while it trains" if spread.host_bytes else "nothing while it trains"
    processes, size = f"its {spread.cluster.per_node} processes", bytes_text(spread.loading_bytes)
    loading = f"{size} while {processes} load the whole model each"
    if spread.sharding.cuts_files:
        loading = f"at most {size} while {processes} cut their parts from the files of the model, which are mapped once"
    lines = [f"Memory of the host{of_node}: {training}; {loading}."]
    if time is not None:
        lines.append(
            f"A step: {time.seconds:.3g} s, of which {time.computing:.3g} s forward and backward, {time.exposed:.2g} s "
            f"waiting for links (which are busy for {time.sent:.2g} s in all), {time.stepping:.2g} s optimizer."
        )
    if spread.cluster.nodes > 1:
        cost = "it does not fit one node" if spread.cost is None else f"{spread.cost:.2f} x that of one node"
        lines.append(f"Device time a token: {cost}.")
    lines.append("All of this is predicted: rates are of data sheets, and what links and kernels reach is assumed.")
    return lines


def _settings_table(plan: Plan) -> RenderableType:
    table = plain_table("What fits, the fastest first" if plan.spread is None else "What fits, what is chosen first")
    if plan.spread is not None:
        table.add_column("devices", overflow="fold")
    for name in ("settings", "peak", "time"):
        table.add_column(name, justify="left" if name == "settings" else "right", overflow="fold")
    from lowtide.memory.allocators.measure import bytes_text

    for each in (plan.chosen, *plan.runners_up):
        chosen = each is plan.chosen
        table.add_row(
            *([each.way] if plan.spread is not None else []),
            _lines(each.settings) or "the defaults",
            ("" if each.traced else "~") + bytes_text(each.peak_bytes),
            f"{each.seconds:.2f} x",
            style="bold green" if chosen else None,
        )
    return table


def _effects_table(plan: Plan) -> RenderableType:
    from rich.text import Text

    from lowtide.memory.allocators.measure import bytes_text

    table = plain_table("What each technique would do by itself")
    table.add_column("technique", overflow="fold")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("numbers", overflow="fold")
    for each in plan.techniques:
        sign = "-" if each.saved_bytes > 0 else "+"
        memory = "0" if not each.saved_bytes else sign + bytes_text(abs(each.saved_bytes))
        numbers = Text(each.changes or "exact", style="yellow" if each.changes else "")
        table.add_row(each.technique, memory, f"{each.seconds:.2f} x", numbers)
    return table


def _lines(settings: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in settings.items())
