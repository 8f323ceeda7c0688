"""`python -m bench.memory`: what each memory technique saves, fine-tuning Qwen2.5-0.5B.

Qwen2.5-0.5B from its config (random weights), two steps of 8 rows, so that the second holds the optimizer's states
too; rows of several lengths. Each run is in a process of its own. On a CPU the peak is the resident one, less what
the imports hold, training is in float32, and the heap is as the `lowtide` command sets it up; on CUDA it is the
allocator's, in bfloat16 mixed precision. Weights, gradients and AdamW's two moments are 16 bytes a parameter, 7.90 GB:
what is above them is activations and the implementation's own. See `cases.py` for the rows.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from bench.measuring.measure import hardware
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import MEMORY, merged, versions, write
from bench.memory.cases import BATCH, CASES, QUICK_BATCH
from bench.memory.surroundings import device_here, environment, saved_weights
from bench.memory.tables import cells

SUMMARY = "Show what each memory technique saves, fine-tuning Qwen2.5-0.5B."
LENGTHS = (4, 32, 128, 512, 1024)
NAME = "memory-qwen2.5-0.5b"


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a run fails."""
    options, console = parse(argv), Console()
    failed = False
    for length in options.lengths:
        table = Table(Column(no_wrap=False), "peak", "s/step", title=f"{options.batch} rows of {length:,} tokens")
        names = options.only or [*CASES]
        with ThreadPoolExecutor(options.at_once) as pool:
            for run in pool.map(lambda name, of=length: measure(name, of, options, console), names):
                failed |= "failed" in run
                table.add_row(*cells(run))
                console.print(*cells(run), sep="  ")
                if options.record:
                    record(run, options)
        console.print(table)
    return int(failed)


def measure(name: str, length: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns what a child measured of one row at one length, or why it could not."""
    run = {"case": name, "batch": options.batch, "length": length}
    case = CASES[name]
    load = {"load_before": os.getloadavg()[0]}
    missing = [package for package in (case.package, *case.needs) if find_spec(package) is None]
    if missing:
        return run | {"skipped": f"needs {', '.join(missing)}"}
    spec = run | {"device": options.device, "weights": saved_weights() if case.four_bit else ""}
    try:
        console.print(f"{name}, {options.batch} rows of {length:,} tokens", style="dim")
        found = run_child(spec, lambda step: None, options.timeout, "bench.memory.child", environment())
        return run | load | {key: value for key, value in found.items() if options.at_once == 1 or "seconds" not in key}
    except ChildFailed as failure:
        console.print("\n".join(failure.last_lines), markup=False, highlight=False)
        return run | {"failed": failure.reason}


def record(run: dict[str, Any], options: argparse.Namespace) -> None:
    """Puts a run beside those that were recorded of this machine, over an earlier one of the same row and size."""
    facts = {"kind": MEMORY, "hardware": hardware(options.device)}
    runs = merged(NAME, facts["hardware"], run | {"versions": versions()}, key=("case", "batch", "length"))
    write(NAME, facts | {"runs": runs})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=SUMMARY)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in a row")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these rows of the table")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BATCH} rows a step instead of {BATCH}")
    parser.add_argument("--at-once", type=int, default=1, help="so many runs at a time, whose times then say nothing")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which one run is given up")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options = parser.parse_args(argv)
    options.batch = QUICK_BATCH if options.quick else BATCH
    options.device = device_here()
    return options


if __name__ == "__main__":
    sys.exit(main())
