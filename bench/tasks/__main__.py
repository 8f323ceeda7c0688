"""`python -m bench.tasks`: tasks of encoders, beside transformers' Trainer with its default collators.

Both train the same BERT of 29 million parameters on the same rows, whose lengths have a long tail, 16 a step; for
sequence to sequence the same T5 of the shape of t5-small. They take turns, each run in a process of its own.
transformers pads a batch to its longest row; with `group_by_length` rows of like lengths meet in a batch, so its steps
have other rows, and tokens/s are compared, over a whole group of rows, which it sorts by length.
"""

import argparse
import sys
from typing import Any

from rich.console import Console

from bench.measuring.measure import GIGABYTE, hardware, matmul_rate
from bench.measuring.processes import run_child
from bench.measuring.results import TASKS, over_earlier, ratios, summarise, versions, write
from bench.tasks.cases import CONTESTANTS, GROUPED, LEAST_BESIDE_GROUPED, OURS, PAIRS, PLAIN, TARGETS

GROUP = 16
"""Batches of a group: of 1,024 rows transformers sorts a quarter at a time."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    options, console = parse(argv), Console()
    reached, found, rate = True, {}, matmul_rate("cpu", "float32")
    for task in options.tasks:
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for turn in range(options.turns):
            for contestant in CONTESTANTS if turn % 2 == 0 else CONTESTANTS[::-1]:
                console.print(f"{task}: {contestant}, turn {turn + 1}")
                # A group begins with its longest rows, so all of one is timed, after a group that warms up.
                warmup, timed = (GROUP, GROUP) if contestant == GROUPED else (options.warmup, options.timed)
                spec = {"task": task, "contestant": contestant, "warmup": warmup, "timed": timed}
                result = run_child(spec, lambda _: None, options.timeout, "bench.tasks.child")
                runs.setdefault((task, contestant), []).append(result)
        found |= summarise(runs, rate)
        reached &= report(task, found[task], console)
    for name, tasks in (("tasks-bert-29m", {*found} - {PAIRS}), ("tasks-t5-small", {*found} & {PAIRS})):
        if options.record and tasks:
            results = {"kind": TASKS, "hardware": hardware("cpu"), "versions": versions()}
            own = over_earlier(name, results["hardware"], "tasks", {task: found[task] for task in sorted(tasks)})
            console.print(f"recorded in {write(name, results | {'matmul_flops_per_second': rate, 'tasks': own})}")
    return 0 if reached else 1


def report(task: str, found: dict[str, dict[str, Any]], console: Console) -> bool:
    """Prints a task against transformers, and whether its targets are reached."""
    target, ours = TARGETS[task], found[OURS]
    speed, peak = ratios(ours, found[PLAIN])
    beside_grouped, _ = ratios(ours, found[GROUPED])
    reached = speed >= target.speed and peak <= target.peak and beside_grouped >= LEAST_BESIDE_GROUPED
    console.print(
        f"{task}: {speed:.2f} times the speed (target {target.speed}), {peak:.2f} of the peak (target {target.peak}, "
        f"{ours['peak_above_start_bytes'] / GIGABYTE:.2f} GB), {beside_grouped:.2f} times the speed with "
        f"group_by_length (target {LEAST_BESIDE_GROUPED}): {'reached' if reached else 'NOT reached'}"
    )
    return reached


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tasks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="TASK")
    parser.add_argument("--turns", type=int, default=2, help="of each contestant [%(default)s]")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed [%(default)s]")
    parser.add_argument("--timed", type=int, default=6, help="steps that are [%(default)s]")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a run [%(default)s]")
    parser.add_argument("--no-record", dest="record", action="store_false", help="record nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
