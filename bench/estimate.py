"""`python -m bench.estimate`: peaks foretold, and the same runs measured.

Each run is foretold in one process and trained in another, on a CPU, with what a user's script has around it: data and
tokenizer from texts, the trainer's defaults, the rehearsal among them. What is compared is the resident peak of the
whole process, whose heap is as the `lowtide` command sets it up. See `estimate_cases.py` for the runs.
"""

import argparse
import json
import statistics
import sys
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.estimate_cases import CASES
from bench.measure import GIGABYTE, hardware
from bench.memory import saved_weights
from bench.processes import ChildFailed, run_child
from bench.results import ESTIMATE, merged, path_of, versions, write
from lowtide.memory.allocator import steady_malloc

SUMMARY = "Compare foretold peaks with measured ones."
NAME = "estimate"
SECONDS = 1800
"""After which a run is given up."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a run fails."""
    options, console = parse(argv), Console()
    table = Table("run", "foretold", "measured", "error", "seconds", title="peaks of processes on a CPU")
    errors, failed = [], False
    for name in options.only or CASES:
        if missing := [package for package in CASES[name].needs if find_spec(package) is None]:
            console.print(f"{name}: needs {', '.join(missing)}")
            continue
        try:
            with console.status(name):
                run = compared(name, options.foretell)
        except ChildFailed as failure:
            failed = True
            console.print(name, failure.reason, *failure.last_lines, sep="\n", markup=False, highlight=False)
            continue
        errors.append(run["error"])
        table.add_row(*cells(run))
        console.print(*cells(run), sep="  ")
        if options.record:
            record(run)
    console.print(table)
    console.print(summary(errors))
    return int(failed)


def compared(name: str, again: bool) -> dict[str, Any]:
    """One run, foretold and measured; `error` is the share by which the first is above the second.

    Args:
        again: beside what was measured of it before, if it was.
    """
    weights = saved_weights() if CASES[name].four_bit else ""

    def child(what: str) -> dict[str, Any]:
        spec = {"case": name, "what": what, "weights": weights}
        return run_child(spec, lambda step: None, SECONDS, "bench.estimate_child", steady_malloc({}))

    foretold = child("foretell")
    peak = (measured_before(name) if again else None) or child("measure")["peak_bytes"]
    return {
        "case": name,
        "measured_bytes": peak,
        "foretold_bytes": foretold["estimate"]["peak_bytes"],
        "error": foretold["estimate"]["peak_bytes"] / peak - 1,
        "phase": foretold["estimate"]["phase"],
        "seconds": foretold["seconds"],
    }


def measured_before(name: str) -> int | None:
    path = path_of(NAME, hardware("cpu"))
    known = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    return next((run["measured_bytes"] for run in known if run["case"] == name), None)


def summary(errors: list[float]) -> str:
    """The mean and the worst of some errors."""
    if not errors:
        return "nothing was measured"
    mean = statistics.mean(abs(error) for error in errors)
    return (
        f"{len(errors)} runs: mean error {mean:.1%}, most above {max(errors):+.1%}, most below {min(errors):+.1%} "
        "(to reach: mean 3%, none above 6%, none more than 2% below)"
    )


def cells(run: dict[str, Any]) -> list[str]:
    sizes = [f"{run[name] / GIGABYTE:.3f} GB" for name in ("foretold_bytes", "measured_bytes")]
    return [run["case"], *sizes, f"{run['error']:+.1%}", f"{run['seconds']:.1f}"]


def record(run: dict[str, Any]) -> None:
    """Puts a run beside those that were recorded of this machine, over an earlier one of the same name."""
    facts = {"kind": ESTIMATE, "hardware": hardware("cpu")}
    runs = merged(NAME, facts["hardware"], run | {"versions": versions()}, key=("case",))
    write(NAME, facts | {"runs": runs})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.estimate", description=SUMMARY)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these runs")
    parser.add_argument("--foretell", action="store_true", help="foretell anew, beside what was measured before")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
