"""`python -m bench.planning_time.built_in`: how long `lowtide gpus` and `plan` take for built-in models.

Each is a process of its own, offline, on the clock from its start to its end: on an idle machine with two cores each is
to end within 60 s. Models are those that are built in, one of each shape, the largest first; devices are a small, a
middling and a large GPU, and for `gpus` all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench.measuring.processes import OFFLINE, ROOT

SUMMARY = "Measure how long gpus, plan and plan --lossy take for built-in models."
MOST = 60
"""Seconds on the clock."""
DEVICES = ("T4-16GB", "RTX-4090", "H100-80GB")
ROWS = {"sft": "1024x8", "dpo": "512+512+512x8"}


class Case(NamedTuple):
    """A command."""

    model: str
    words: str


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; returns 1 where a command took longer, or failed."""
    options, console = parse(argv), Console()
    runs = []
    for case in cases(options):
        found = timed(case)
        runs.append(found)
        mark = "" if found["ok"] else f"  ABOVE {MOST} s" if found["status"] in (0, 1) else "  FAILED"
        console.print(f"{found['seconds']:6.1f} s  {case.words}{mark}", markup=False, soft_wrap=True)
    console.print(table(runs))
    if options.output:
        with Path(options.output).open("w", encoding="utf-8") as file:
            json.dump(runs, file, indent=1)
    return 0 if all(run["ok"] for run in runs) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.planning_time.built_in", description=SUMMARY)
    parser.add_argument("--commands", nargs="*", choices=COMMANDS, default=list(COMMANDS), help="which of the commands")
    parser.add_argument("--methods", nargs="*", choices=ROWS, default=["sft"], help="(default: sft)")
    parser.add_argument("--models", nargs="*", metavar="NAME", help="(default: one of each built-in shape)")
    parser.add_argument("--output", metavar="FILE", help="also write JSON")
    return parser.parse_args(argv)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The commands, by model."""
    for model in options.models or shapes():
        for method in options.methods:
            for command in options.commands:
                for words in COMMANDS[command]:
                    yield Case(model, words.format(method=method, model=model, rows=ROWS[method]))


COMMANDS = {
    "gpus": ("gpus {method} --model {model} --lengths {rows}",),
    **{
        name: tuple(f"plan {{method}} --model {{model}} --lengths {{rows}} --device {each}{lossy}" for each in DEVICES)
        for name, lossy in {"plan": "", "lossy": " --lossy"}.items()
    },
}


def shapes() -> list[str]:
    """A model of each built-in shape, the largest first."""
    from lowtide.planner.answers.known_models import known_models

    first: dict[str, str] = {}
    models = known_models()
    for name, each in models.items():
        first.setdefault(json.dumps(each["config"], sort_keys=True), name)
    return sorted(first.values(), key=lambda name: -models[name]["parameters"])


def timed(case: Case) -> dict[str, Any]:
    """The seconds of a command on the clock, with its status: 0 and 1 are answers."""
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT / "src")}
    began = time.perf_counter()
    command = [sys.executable, "-m", "lowtide", *case.words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    status = done.returncode
    return {**case._asdict(), "seconds": seconds, "status": status, "ok": status in (0, 1) and seconds <= MOST}


def table(runs: list[dict[str, Any]]) -> Table:
    """The longest of each command."""
    made = Table(box=box.SIMPLE_HEAD)
    for name in ("command", "runs", "longest, s", "at most", "above"):
        made.add_column(name, justify="left" if name == "command" else "right")
    for command in dict.fromkeys(_kind(run) for run in runs):
        own = [run for run in runs if _kind(run) == command]
        above = sum(not run["ok"] for run in own)
        longest = max(run["seconds"] for run in own)
        style = "red" if above else "green"
        made.add_row(command, str(len(own)), f"{longest:.1f}", str(MOST), str(above), style=style)
    return made


def _kind(run: dict[str, Any]) -> str:
    return run["words"].split()[0] + " --lossy" * run["words"].endswith("--lossy")


if __name__ == "__main__":
    sys.exit(main())
