"""`python -m bench.memory`: what each memory technique saves, fine-tuning Qwen2.5-0.5B.

Qwen2.5-0.5B from its config (random weights), two steps of 8 rows, so that the second holds the optimizer's states
too; rows of several lengths. Each run is in a process of its own. On a CPU the peak is the resident one, less what
the imports hold, training is in float32, and the heap is as the `lowtide` command sets it up; on CUDA it is the
allocator's, in bfloat16 mixed precision. Weights, gradients and AdamW's two moments are 16 bytes a parameter, 7.90 GB:
what is above them is activations and the implementation's own. See `memory_cases.py` for the rows.
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from bench.measure import GIGABYTE, hardware
from bench.memory_cases import CASES
from bench.processes import ChildFailed, run_child
from bench.results import MEMORY, merged, versions, write
from bench.tokenizer import cache_folder
from lowtide.memory.allocators import settings as allocator

SUMMARY = "Show what each memory technique saves, fine-tuning Qwen2.5-0.5B."
LENGTHS = (4, 32, 128, 512, 1024)
BATCH, QUICK_BATCH = 8, 2
NAME = "memory-qwen2.5-0.5b"
ENVIRONMENT = {**allocator.steady_malloc({}), allocator.NAME: allocator.SETTING}
"""Of a run: the heap, and the device's segments, of the `lowtide` command."""


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
        found = run_child(spec, lambda step: None, options.timeout, "bench.memory_child", environment())
        return run | load | {key: value for key, value in found.items() if options.at_once == 1 or "seconds" not in key}
    except ChildFailed as failure:
        console.print("\n".join(failure.last_lines), markup=False, highlight=False)
        return run | {"failed": failure.reason}


def environment() -> dict[str, str]:
    """Variables of a child: the heap and segments of the `lowtide` command; threads wait without taking time."""
    return {**ENVIRONMENT, "OMP_WAIT_POLICY": "PASSIVE"}


def saved_weights(dtype: str = "bfloat16") -> str:
    """The folder of the model in a dtype, made on the first call by a process of its own."""
    folder = cache_folder() / f"qwen2.5-0.5b-{dtype}"
    if not folder.exists():
        cache_folder().mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache_folder()))
        run_child({"save": str(scratch), "dtype": dtype}, lambda step: None, 600, module="bench.memory_child")
        scratch.replace(folder)
    return str(folder)


def record(run: dict[str, Any], options: argparse.Namespace) -> None:
    """Puts a run beside those that were recorded of this machine, over an earlier one of the same row and size."""
    facts = {"kind": MEMORY, "hardware": hardware(options.device)}
    runs = merged(NAME, facts["hardware"], run | {"versions": versions()}, key=("case", "batch", "length"))
    write(NAME, facts | {"runs": runs})


def cells(run: dict[str, Any]) -> list[str]:
    """Name, peak and seconds of a run, for a table."""
    if "peak_bytes" not in run:
        return [run["case"], run.get("failed") or run["skipped"], ""]
    reserved = f" ({run['reserved_bytes'] / GIGABYTE:.2f} reserved)" if run["reserved_bytes"] else ""
    seconds = f"{run['step_seconds']:.1f}" if "step_seconds" in run else ""
    return [run["case"], f"{run['peak_bytes'] / GIGABYTE:.2f} GB{reserved}", seconds]


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


def device_here() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
