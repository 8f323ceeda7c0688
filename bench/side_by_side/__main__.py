"""`python -m bench.side_by_side`: lowtide beside TRL with Liger and Unsloth on a GPU, each run in a process of its own.

Models have random weights. Rows are of unequal lengths, then of 1,024 tokens each; times and peaks are those of the
steps after some warm ones. Libraries that are not installed beside lowtide are found by `--path unsloth=FOLDER`. With
`--small` tiny models train on a CPU, which shows that it works and measures nothing.
"""

import argparse
import os
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import SIDE_BY_SIDE, over_earlier, versions, write
from bench.side_by_side.cases import CASES, CONTESTANTS

SUMMARY = "Train lowtide beside TRL with Liger and Unsloth on a GPU: tokens a second and peaks."
NAME = "side by side"
CHILD = "bench.side_by_side.child"
DEFAULT = ("lowtide", "lowtide-stock", "trl-liger", "unsloth")


def main(argv: list[str] | None = None) -> int:
    """Trains, prints and records; returns 1 where a run fails."""
    options, console = parse(argv), Console()
    found: dict[str, Any] = {}
    failed = False
    for case in options.cases:
        for contestant in options.contestants:
            spec = {"case": case, "contestant": contestant, "small": options.small}
            try:
                run = run_child(spec, lambda step: None, options.timeout, CHILD, surroundings(contestant, options.path))
            except ChildFailed as failure:
                failed = True
                said = [f"{case}, {contestant}: {failure.reason}", *failure.last_lines]
                console.print(*said, sep="\n", markup=False, highlight=False)
                continue
            found[f"{case}, {contestant}"] = run | {"versions": versions()}
    if found:
        console.print(table(found))
    if options.record and found:
        machine = hardware("cuda")
        runs = over_earlier(NAME, machine, "runs", found)
        console.print(f"recorded in {write(NAME, {'kind': SIDE_BY_SIDE, 'hardware': machine, 'runs': runs})}")
    return int(failed)


def surroundings(contestant: str, paths: list[str]) -> dict[str, str]:
    """The variables by which a contestant's process finds what it imports."""
    folders = [path.partition("=")[2] for path in paths if path.partition("=")[0] == CONTESTANTS[contestant].package]
    if not folders:
        return {}
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])}


def table(found: dict[str, Any]) -> Table:
    shown = Table("case", "contestant", "equal rows", "peak", "unequal rows", "peak", "reserved")
    for name, run in found.items():
        sizes = [run[f"{each}_bytes"] for each in ("equal", "unequal", "reserved")]
        equal, unequal, reserved = ("" if size is None else f"{size / GIGABYTE:.2f} GB" for size in sizes)
        rates = (f"{run[f'{each}_tokens_per_second']:,.0f} tokens/s" for each in ("equal", "unequal"))
        shown.add_row(*name.split(", "), next(rates), equal, next(rates), unequal, reserved)
    return shown


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.side_by_side", description=SUMMARY)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(DEFAULT), help="default: four")
    parser.add_argument("--path", action="append", default=[], metavar="PACKAGE=FOLDER", help="where a library lies")
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU; nothing is recorded")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run, at most (default: 300)")
    parser.add_argument("--no-record", dest="record", action="store_false", help="leave the record as it is")
    options = parser.parse_args(argv)
    options.record = options.record and not options.small
    if not options.small and not torch.cuda.is_available():
        parser.error("this machine has no CUDA GPU: take --small to see that it works")
    return options


if __name__ == "__main__":
    sys.exit(main())
