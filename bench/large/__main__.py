"""`python -m bench.large`: models of 8B parameters and layers of 70B on one GPU, beside what the planner says of them.

Where there is a GPU each run is trained on it: weights are random, and a few steps are taken. Elsewhere, or with
`--predict`, peaks are predicted alone, beside what a record of that GPU has.
"""

import argparse
import statistics
import sys
from typing import Any

from rich.console import Console

from bench.large.cases import CASES
from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import LARGE, over_earlier, versions, write
from bench.memory.surroundings import device_here

NAME = "large"
CHILD = "bench.large.child"
SECONDS = 1800
"""After which a run is given up."""


def main(argv: list[str] | None = None) -> int:
    """Predicts, measures where there is a GPU, prints and records; returns 1 where a run fails."""
    options, console = parse(argv), Console()
    found, failed = {}, False
    earlier = {} if options.measures else over_earlier(NAME, {"gpu": options.gpu}, "runs", {})
    for name in options.only or CASES:
        try:
            run = {**earlier.get(name, {}), "predicted": child(name, "predict", options)}
            if options.measures:
                run |= {"measured": child(name, "measure", options), "versions": versions()}
        except ChildFailed as failure:
            failed = True
            console.print(name, failure.reason, *failure.last_lines, sep="\n", markup=False, highlight=False)
            continue
        found[name] = run
        console.print(line(name, run), markup=False, highlight=False)
    if options.record and found and options.hardware:
        results = {"kind": LARGE, "hardware": options.hardware}
        results["runs"] = over_earlier(NAME, options.hardware, "runs", found)
        console.print(f"recorded in {write(NAME, results)}")
    return int(failed)


def child(name: str, what: str, options: argparse.Namespace) -> dict[str, Any]:
    return run_child({"case": name, "what": what, "device": options.gpu}, lambda step: None, SECONDS, CHILD)


def line(name: str, run: dict[str, Any]) -> str:
    """A run in a line."""
    parts = []
    for which in ("predicted", "measured"):
        if which in run:
            allocated, reserved = (run[which][f"{each}_bytes"] / GIGABYTE for each in ("allocated", "reserved"))
            parts.append(f"{which} {allocated:.2f} GB, {reserved:.2f} GB reserved")
    if seconds := run.get("measured", {}).get("seconds"):  # none of a run beside others
        parts.append(f"{statistics.median(seconds):.2f} s a step")
    return f"{name}: {'; '.join(parts)}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.large", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these runs")
    parser.add_argument("--predict", metavar="GPU", help="predict alone, for a GPU by its name (such as 'NVIDIA H200')")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options = parser.parse_args(argv)
    options.measures = options.predict is None and device_here() == "cuda"
    own = hardware("cuda") if options.measures else {}
    options.gpu = own.get("gpu") or options.predict
    if options.gpu is None:
        parser.error("there is no GPU here: name one with --predict")
    options.hardware = own or over_earlier(NAME, {"gpu": options.gpu}, "hardware", {})
    return options


if __name__ == "__main__":
    sys.exit(main())
