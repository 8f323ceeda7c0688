"""`python -m bench.streamed`: what weights that are not resident save, and what they cost, training Qwen2.5-0.5B.

The model is Qwen2.5-0.5B from its config, with random weights that are saved as safetensors first. Each run takes a few
steps of 2 rows of 1,024 tokens (DPO: of a pair of 256 tokens) in a process of its own; its peak is the resident one,
less what the imports hold, and covers loading the model. Times are medians of the steps after the first, which finds
the files in the system's cache: by the clock, and the cores' time, which other processes on the machine hardly change.
"""

import argparse
import statistics
import sys
from typing import Any

from rich.console import Console

from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import STREAMED, over_earlier, versions, write
from bench.memory.surroundings import environment, saved_weights
from bench.streamed.cases import CASES, TARGETS

NAME = "streamed-qwen2.5-0.5b"


def main(argv: list[str] | None = None) -> int:
    """Measures, prints measured beside target, and records; returns 1 where a target is missed or a run fails."""
    options, console = parse(argv), Console()
    weights = {"bfloat16": saved_weights(), "float32": saved_weights("float32")}
    found: dict[str, Any] = {}
    for name in options.only or CASES:
        spec = {"case": name, "steps": options.steps, "weights": weights[CASES[name].dtype]}
        try:
            run = run_child(spec, lambda step: None, options.timeout, "bench.streamed.child", environment())
        except ChildFailed as failure:
            console.print("\n".join(failure.last_lines), markup=False, highlight=False)
            run = {"failed": failure.reason}
        found[name] = run
        console.print(row(name, run), markup=False, highlight=False)
    missed = any("failed" in run for run in found.values())
    for target in TARGETS:
        if {target.of, *([target.against] if target.against else [])} <= found.keys() and not missed:
            text, reached = target.verdict(found)
            console.print(text, markup=False, highlight=False)
            missed |= not reached
    if options.record:
        results = {"kind": STREAMED, "hardware": hardware("cpu"), "versions": versions()}
        results["runs"] = over_earlier(NAME, results["hardware"], "runs", found)
        console.print(f"recorded in {write(NAME, results)}")
    return int(missed)


def row(name: str, run: dict[str, Any]) -> str:
    """A run in a line."""
    if "failed" in run:
        return f"{name}: failed, {run['failed']}"
    peak = f"{name}: {run['peak_bytes'] / GIGABYTE:.2f} GB"
    if not run["step_seconds"]:
        return peak
    seconds, cores = (statistics.median(run[each]) for each in ("step_seconds", "step_cpu_seconds"))
    return f"{peak}, {seconds:.1f} s a step, {cores:.1f} s of the cores"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.streamed", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these runs")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run; 1 gives a peak alone")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which one run is given up")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
