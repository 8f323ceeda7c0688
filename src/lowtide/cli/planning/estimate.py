"""`lowtide estimate sft --config run.yaml`: the peak of a run by phase and category, before any weight is loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.endings import DOES_NOT_FIT
from lowtide.cli.planning.described_run import (
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
    from rich.console import RenderableType

    from lowtide.planner.estimate import Estimate


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "Predict the peak memory of a run, for each phase and each kind of tensor. No weight is loaded for it. "
        "Takes the options that `lowtide METHOD` takes."
    )
    own, group = add_description(subparsers, "estimate", method, description)
    if group is not None:
        group.add_argument(
            "--budget", metavar="SIZE", help="what the run may take: 24GiB, 24GB, 24g or bytes (default: what is free)"
        )
        group.add_argument("--output", type=Path, metavar="FILE", help="write the estimate here too, as JSON")
    own.set_defaults(run=run)
    return own


def run(arguments: argparse.Namespace) -> int:
    """Estimate, and show it; the exit status is 1 where the run does not fit.

    Raises:
        ValueError, OSError: an argument, a file or the model is wrong; the message says which, and what to do.
    """
    described = described_run(arguments)
    from lowtide.planner.tracing_process import tracing_here
    from lowtide.planning import estimate_method
    from lowtide.terminal import Console

    with Console(stderr=True).status("Tracing the run on tensors without memory"), tracing_here():
        found = estimate_method(
            described.method,
            described.model,
            budget=arguments.budget or described.values.get("memory_budget"),
            device=device_of(arguments),
            **described.inputs(),
        )
    as_json = json.dumps(found.to_dict(), indent=2)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_output(arguments.output, as_json + "\n")
    status = 0 if found.fits else DOES_NOT_FIT
    if arguments.json:
        print(as_json)
        return status
    console = Console()
    console.print(noted(""), noted(f"{found.verdict[0].upper()}{found.verdict[1:]}.", style=style_of(found.fits)))
    console.print(_table(found))
    for note in (*of_the_start(found), *found.assumptions, *found.notes):
        console.print(noted(note))
    if not found.fits:
        command = f"lowtide plan {described.method}"
        console.print(noted(f"{command}, with the same options, looks for settings that fit.", style=""))
    return status


def _table(estimate: Estimate) -> RenderableType:
    """Phases down, categories across; those that hold nothing are left out."""
    from lowtide.memory.allocators.measure import bytes_text

    names = {name: None for phase in estimate.phases.values() for name, size in phase.items() if size}
    table = plain_table(
        f"Peak {bytes_text(estimate.peak_bytes)} on {estimate.device}, in {estimate.phase} (+-{estimate.band:.0%})"
    )
    table.add_column("what holds it", overflow="fold")
    for phase in estimate.phases:
        table.add_column(phase, justify="right", overflow="fold", style="bold" if phase == estimate.phase else None)
    for name in names:
        sizes = (phase.get(name, 0) for phase in estimate.phases.values())
        table.add_row(name, *(bytes_text(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("in all", *(bytes_text(sum(phase.values())) for phase in estimate.phases.values()))
    return table
