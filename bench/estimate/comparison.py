"""`python -m bench.estimate`: peaks predicted, and the same runs measured.

Each run is predicted in one process and trained in another, with what a user's script has around it: data and tokenizer
from texts, the trainer's defaults, the rehearsal among them. On a CPU what is compared is the resident peak of the
whole process, whose heap is as the `lowtide` command sets it up. Where there is a GPU the runs are on it, and it is
what torch's allocator reserves at most, and what it hands out; such runs can be predicted anew anywhere, beside what a
record of that GPU has. See `cases.py` for the runs.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.estimate.cases import CASES, EstimateCase
from bench.measuring.arguments import parser_of
from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.processes import ChildFailed, run_child, run_ranks
from bench.measuring.results import ESTIMATE, merged, path_of, versions, write
from bench.memory.surroundings import ENVIRONMENT, device_here, saved_weights

SUMMARY = "Compare predicted peaks with measured ones."
CHILD = "bench.estimate.child"
SECONDS = 1800
"""After which a run is given up."""


class Target(NamedTuple):
    """What errors are to be at most, as shares of what is measured."""

    mean: float
    above: float
    below: float


TARGETS = {"cpu": Target(0.03, 0.06, -0.02), "cuda": Target(0.02, 0.05, -0.05)}


class Comparison(NamedTuple):
    """Runs whose peaks are compared, and where the results are kept."""

    name: str
    kind: str
    cases: Mapping[str, EstimateCase]


ESTIMATES = Comparison("estimate", ESTIMATE, CASES)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a run fails."""
    return compare(ESTIMATES, parse(argv, ESTIMATES, SUMMARY))


def compare(comparison: Comparison, options: argparse.Namespace) -> int:
    """Measures, prints and records the runs that are asked for; returns 1 where one fails."""
    console = Console()
    table = Table("run", "predicted", "measured", "error", "seconds", title=f"peaks on {options.device}")
    runs, failed = [], False
    for name in options.only or names(comparison, options.device):
        if missing := [package for package in comparison.cases[name].needs if find_spec(package) is None]:
            console.print(f"{name}: needs {', '.join(missing)}")
            continue
        try:
            with console.status(name):
                run = compared(comparison, name, options)
        except ChildFailed as failure:
            failed = True
            console.print(name, failure.reason, *failure.last_lines, sep="\n", markup=False, highlight=False)
            continue
        runs.append(run)
        table.add_row(*cells(run))
        console.print(*cells(run), sep="  ")
        if options.record:
            record(comparison, run, options.hardware)
    console.print(table)
    console.print(summary(runs, options.device))
    return int(failed)


def names(comparison: Comparison, device: str) -> list[str]:
    """The runs for a device."""
    return [name for name, case in comparison.cases.items() if device == "cuda" or not case.large]


def compared(comparison: Comparison, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run, predicted and measured; `error` is the share by which the first is above the second.

    Of several ranks, the one that holds most is measured.
    """
    case = comparison.cases[name]
    weights = saved_weights() if case.four_bit and not options.gpu else ""
    spec = {"case": name, "weights": weights, "device": options.gpu or options.device}

    def child(what: str) -> dict[str, Any]:
        return run_child(spec | {"what": what}, lambda step: None, SECONDS, CHILD, ENVIRONMENT)

    def measure() -> dict[str, Any]:
        if case.ranks == 1:
            return child("measure")
        found = run_ranks(spec | {"what": "measure"}, case.ranks, CHILD, SECONDS, environment=ENVIRONMENT)
        return max(found, key=lambda rank: rank["peak_bytes"])

    predicted = child("predict")
    measured = (measured_before(comparison, name, options.hardware) if options.again else None) or measure()
    run = {
        "case": name,
        "measured_bytes": measured["peak_bytes"],
        "predicted_bytes": predicted["peak_bytes"],
        "error": predicted["peak_bytes"] / measured["peak_bytes"] - 1,
        "phase": predicted["phase"],
        "seconds": predicted["seconds"],
        "versions": measured.get("versions") or versions(),
    }
    if options.device == "cuda":
        run |= {
            "measured_allocated_bytes": measured["allocated_bytes"],
            "predicted_allocated_bytes": predicted["allocated_bytes"],
            "allocated_error": predicted["allocated_bytes"] / measured["allocated_bytes"] - 1,
        }
    return run


def recorded_runs(comparison: Comparison, machine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is recorded of a machine, by the names of the runs."""
    path = path_of(comparison.name, machine)
    known = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    return {run["case"]: run for run in known}


def measured_before(comparison: Comparison, name: str, machine: dict[str, Any]) -> dict[str, Any] | None:
    found = recorded_runs(comparison, machine).get(name)
    if found is None:
        return None
    return {
        "peak_bytes": found["measured_bytes"],
        "allocated_bytes": found.get("measured_allocated_bytes", 0),
        "versions": found["versions"],
    }


def summary(runs: list[dict[str, Any]], device: str) -> str:
    """The mean and the worst of the errors of some runs."""
    if not runs:
        return "nothing was measured"
    target = TARGETS[device]
    parts = []
    for key, what in (("error", ""), ("allocated_error", " of what is allocated")):
        errors = [run[key] for run in runs if key in run]
        if errors:
            mean = statistics.mean(map(abs, errors))
            parts.append(f"mean error{what} {mean:.1%}, most above {max(errors):+.1%}, most below {min(errors):+.1%}")
    return (
        f"{len(runs)} runs: {'; '.join(parts)} (to reach: mean {target.mean:.0%}, none above {target.above:.0%}, none "
        f"more than {-target.below:.0%} below)"
    )


def cells(run: dict[str, Any]) -> list[str]:
    """Name, predicted, measured, error and seconds of a run, for a table; on CUDA what is allocated in brackets."""

    def size(name: str) -> str:
        inside = run.get(f"{name}_allocated_bytes")
        return f"{run[f'{name}_bytes'] / GIGABYTE:.3f} GB" + (f" ({inside / GIGABYTE:.3f})" if inside else "")

    allocated = f" ({run['allocated_error']:+.1%})" if "allocated_error" in run else ""
    error = f"{run['error']:+.1%}{allocated}"
    return [run["case"], size("predicted"), size("measured"), error, f"{run['seconds']:.1f}"]


def record(comparison: Comparison, run: dict[str, Any], machine: dict[str, Any]) -> None:
    """Puts a run beside those that were recorded of the machine, over an earlier one of the same name."""
    facts = {"kind": comparison.kind, "hardware": machine}
    runs = merged(comparison.name, facts["hardware"], run, key=("case",))
    write(comparison.name, facts | {"runs": runs})


def parse(argv: list[str] | None, comparison: Comparison, text: str) -> argparse.Namespace:
    """The options of a comparison, which its `text` describes."""
    parser = parser_of(text)
    parser.add_argument("--only", nargs="+", choices=comparison.cases, metavar="NAME", help="these runs")
    again = "predict anew, beside what was measured before: here, or on a GPU that is recorded (such as 'NVIDIA H200')"
    parser.add_argument("--predict", dest="again", metavar="GPU", nargs="?", const="here", help=again)
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options = parser.parse_args(argv)
    options.gpu = None if options.again in (None, "here") else options.again
    options.device = "cuda" if options.gpu else device_here()
    options.hardware = {"gpu": options.gpu} if options.gpu else hardware(options.device)
    if options.gpu:
        path = path_of(comparison.name, options.hardware)
        if not path.exists():
            parser.error(f"nothing is recorded of {options.gpu!r}: there is no {path}")
        options.hardware = json.loads(path.read_text(encoding="utf-8"))["hardware"]
        options.only = options.only or [*recorded_runs(comparison, options.hardware)]
    return options
