"""`python -m bench.attention_heads`: what attention over groups of heads saves of a long row, and what it costs.

Two layers of Qwen3-0.6B's shape (hidden 1,024, 16 heads, 8 of them of keys, 128 wide), float32, gradient checkpointing
and MLPs in tiles, so that attention is what takes the memory. One row goes forward and back, for each number of groups
in a process of its own. The resident peak beyond weights and gradients is A / N + B for N groups: A is what the heads
hold, B all else. From N = 1 and N = 8 follow A and B, and so what two and four groups should take.
"""

import argparse
import sys
from typing import Any

from rich.console import Console

from bench.measuring.measure import GIGABYTE, hardware
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import HEADS, versions, write

SUMMARY = "Measure attention over groups of heads on one long row."
GROUPS = (1, 2, 4, 8)
OFF = 0.1
"""By which share of A a peak may be off A / N + B."""
WITHOUT_HOLES = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}
"""For a child: what a MiB or more held goes back to the system at once, so a peak has no holes of the heap."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a run fails or memory does not fall as 1 / N."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention_heads", description=SUMMARY)
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which one run is given up")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options, console = parser.parse_args(argv), Console()
    try:
        runs = [measure(groups, options, console) for groups in GROUPS]
    except ChildFailed as failure:
        console.print(f"[red]failed: {failure.reason}[/]")
        console.print("\n".join(failure.last_lines), markup=False, highlight=False)
        return 1
    shares, rest = parts_of(runs)
    console.print(f"A = {shares / GIGABYTE:.3f} GB, B = {rest / GIGABYTE:.3f} GB")
    missed = [run for run in runs if abs(run["peak_bytes"] - shares / run["groups"] - rest) > OFF * shares]
    for run in missed:
        console.print(f"[red]missed: {run['groups']} groups are not within {OFF:.0%} of A / N + B[/]")
    if options.record:
        results = {"kind": HEADS, "tokens": options.tokens, "runs": runs, "hardware": hardware("cpu")}
        console.print(f"recorded in {write('heads-qwen3-0.6b', results | {'versions': versions()})}")
    return 1 if missed else 0


def measure(groups: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns what a child measured with so many groups, and prints it."""
    spec = {"groups": groups, "tokens": options.tokens}
    run = run_child(spec, lambda step: None, options.timeout, "bench.attention_heads.child", WITHOUT_HOLES)
    console.print(
        f"{groups} groups: {run['peak_bytes'] / GIGABYTE:.3f} GB, {run['cpu_seconds']:.1f} s of the processor, "
        f"loss {run['loss']:.6f}, norm of the gradients {run['norm']:.6f}"
    )
    return run | spec


def parts_of(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns A and B of a peak of A / N + B, from the fewest and the most groups."""
    first, last = runs[0], runs[-1]
    shares = (first["peak_bytes"] - last["peak_bytes"]) / (1 / first["groups"] - 1 / last["groups"])
    return shares, first["peak_bytes"] - shares / first["groups"]


if __name__ == "__main__":
    sys.exit(main())
