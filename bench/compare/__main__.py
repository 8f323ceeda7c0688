"""`python -m bench.compare`: lowtide and TRL side by side, alternating, each run in a process of its own.

Prints real tokens a second, the peak above what the process held before the trainer was constructed, and their
ratios, and records them in bench/results/ with the hardware and versions. Contestants take turns (A B C, C B A),
so that a machine that warms up or is shared slows all of them alike; the medians of the runs are compared. With
`--against COMMIT` the lowtide of that commit is one more contestant.
"""

import argparse
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from bench.compare.contestants import BATCH
from bench.compare.methods import METHODS
from bench.compare.tables import BUSY, OURS, print_comparison
from bench.inputs.rows import CASES
from bench.inputs.shapes import SHAPES
from bench.inputs.tokenizer import tokenizer_for
from bench.measuring.other_commits import AGAINST, source_of
from bench.measuring.processes import ChildFailed, progress_bar, run_child
from bench.measuring.results import different_rows, record, summarise, versions

SUMMARY = "Compare lowtide with TRL: real tokens a second, and the peak above what the process held before."
QUICK = {"repeat": 1, "timed": 2}


def main(argv: list[str] | None = None) -> int:
    """Runs what the command line asks for; returns 1 if any run failed."""
    options, console = parse(argv), Console()
    load = os.getloadavg()[0]
    if load > BUSY:
        console.print(f"[yellow]other programs are running (load {load:.1f}): times will be rough[/]")
    succeeded = []
    with source_of(options.against) as before:
        for shape in options.shapes:
            with console.status(f"{shape}: the machine's matmul rate"):
                spec = {"shape": shape, "contestant": None}
                machine = run_child(spec, lambda step: None, options.timeout) | {"load_before": load}
            runs = [Run(method, shape, options, before) for method in options.method]
            succeeded += [compare(run, machine, console) for run in runs]
    return 0 if all(succeeded) else 1


@dataclass(frozen=True)
class Run:
    """One method on one model, as far as the command line asks for it."""

    method: str
    shape: str
    options: argparse.Namespace
    before: dict[str, str] = field(default_factory=dict)
    """The variables under which a child imports the library of `--against`."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.shape}"

    @property
    def cases(self) -> list[str]:
        return chosen(self.options.cases, CASES[self.method])

    @property
    def contestants(self) -> list[str]:
        found = chosen(self.options.contestants, METHODS[self.method].contestants)
        return [*found, f"{OURS}@{self.options.against}"] if self.options.against else found

    def environment(self, contestant: str) -> dict[str, str]:
        """Returns the variables that a contestant's child gets beside this process's."""
        return self.before if "@" in contestant else {}

    def specification(self, case: str, contestant: str) -> dict[str, Any]:
        """Returns what a child is told."""
        return {
            "method": self.method,
            "shape": self.shape,
            "case": case,
            "contestant": contestant.partition("@")[0],
            "warmup": self.options.warmup,
            "timed": self.options.timed,
            "tokenizer": str(tokenizer_for(CASES[self.method][case].rows())),
        }


def compare(run: Run, machine: dict[str, Any], console: Console) -> bool:
    """Measures every case and contestant of one method on one model; returns whether all runs succeeded."""
    options, shape = run.options, run.shape
    runs, failures = measure_all(run, console)
    cases = summarise(runs, machine["matmul_flops_per_second"])
    unpacked = {name for name, known in METHODS[run.method].contestants.items() if known.rows == BATCH}
    failures += different_rows(cases, unpacked)
    results = {
        "method": run.method,
        "shape": shape,
        "device": SHAPES[shape].device,
        "dtype": SHAPES[shape].dtype,
        "command": " ".join(["python -m bench.compare", *sys.argv[1:]]),
        "warmup": options.warmup,
        "timed": options.timed,
        **machine,
        "sources": {case: CASES[run.method][case].source() for case in run.cases},
        "versions": versions(),
        "cases": cases,
        "failures": failures,
    }
    print_comparison(results, console)
    for failure in failures:
        console.print(f"[red]{failure}[/]")
    if options.record and runs:
        console.print(f"recorded in {record(results)}; `python -m bench.docs` brings docs/benchmarks.md up to date")
    return not failures


def measure_all(run: Run, console: Console) -> tuple[dict, list[str]]:
    """Returns the results of all runs by (case, contestant), and a line for each run that failed."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failures: list[str] = []
    options = run.options
    turns = [
        (case, turn, contestant)
        for case in run.cases
        for turn in range(options.repeat)
        for contestant in run.contestants[:: 1 if turn % 2 == 0 else -1]
    ]
    with progress_bar(console) as bar:
        overall = bar.add_task(run.name, total=len(turns) * (options.warmup + options.timed))
        for number, (case, turn, contestant) in enumerate(turns):
            bar.update(overall, description=f"{run.name} {case}: {contestant}, turn {turn + 1} of {options.repeat}")
            spec = run.specification(case, contestant)
            try:
                environment = run.environment(contestant)
                result = run_child(spec, lambda step: bar.advance(overall), options.timeout, environment=environment)
                runs.setdefault((case, contestant), []).append(result)
            except ChildFailed as failure:
                failures.append(f"{case}: {contestant}: {failure.reason}")
                console.print(f"[red]{case}: {contestant} failed: {failure.reason}[/]")
                console.print("\n".join(failure.last_lines), markup=False, highlight=False)
            bar.update(overall, completed=(number + 1) * (options.warmup + options.timed))
    return runs, failures


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=SUMMARY)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="models; default: those for this machine's device")
    parser.add_argument("--cases", nargs="+", help="default: all of each method's")
    parser.add_argument("--contestants", nargs="+", help="default: all of each method's")
    parser.add_argument("--against", metavar="COMMIT", help=AGAINST)
    parser.add_argument("--warmup", type=positive, default=1, help="steps that are not timed")
    parser.add_argument("--timed", type=positive, default=4, help="steps that are timed")
    parser.add_argument("--repeat", type=positive, default=2, help="turns that each contestant takes")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which one run is given up")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK}, and nothing is recorded")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options = parser.parse_args(argv)
    if options.quick:
        vars(options).update(QUICK, record=False)
    options.shapes = options.shapes or shapes_for_this_machine()
    for method in options.method:
        for name, known in (("cases", CASES[method]), ("contestants", METHODS[method].contestants)):
            unknown = [choice for choice in getattr(options, name) or () if choice not in known]
            if unknown:
                parser.error(f"--{name}: {unknown[0]!r} is none of {method}'s: {', '.join(known)}")
    return options


def chosen(names: list[str] | None, known: Collection[str]) -> list[str]:
    """Returns what the command line names of what there is, or all of it."""
    return names or list(known)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def shapes_for_this_machine() -> list[str]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [name for name, shape in SHAPES.items() if shape.device == device]


if __name__ == "__main__":
    sys.exit(main())
