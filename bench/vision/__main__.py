"""`python -m bench.vision`: SFT of a vision-language model on rows with two small images, beside TRL 1.16.

Both train the same Qwen2.5-VL of some 40 million parameters on the same prompts and answers, whose lengths have a long
tail, 8 a step. They take turns, each run in a process of its own. TRL pads a batch to its longest row. Real tokens are
counted, those of images among them.
"""

import argparse
import sys
from typing import Any

from rich.console import Console

from bench.measuring.measure import GIGABYTE, hardware, matmul_rate
from bench.measuring.processes import run_child
from bench.measuring.results import VISION, ratios, summarise, versions, write
from bench.vision.cases import CASES, CONTESTANTS, OURS, THEIRS

SPEED, PEAK = 2.0, 0.5
"""What is to be reached against TRL: times its tokens/s, and of its peak."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    options, console = parse(argv), Console()
    reached, found, rate = True, {}, matmul_rate("cpu", "float32")
    for case in options.cases:
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for turn in range(options.turns):
            for contestant in CONTESTANTS if turn % 2 == 0 else CONTESTANTS[::-1]:
                console.print(f"{case}: {contestant}, turn {turn + 1}")
                spec = {"case": case, "contestant": contestant, "warmup": options.warmup, "timed": options.timed}
                result = run_child(spec, lambda _: None, options.timeout, "bench.vision.child")
                runs.setdefault((case, contestant), []).append(result)
        found |= summarise(runs, rate)
        reached &= report(case, found[case], console)
    if options.record:
        results = {"kind": VISION, "hardware": hardware("cpu"), "versions": versions()}
        results |= {"matmul_flops_per_second": rate, "cases": found}
        console.print(f"recorded in {write('vision-qwen2.5-vl-40m', results)}")
    return 0 if reached else 1


def report(case: str, found: dict[str, dict[str, Any]], console: Console) -> bool:
    """Prints a case against TRL, and whether its targets are reached."""
    speed, peak = ratios(found[OURS], found[THEIRS])
    reached = speed >= SPEED and peak <= PEAK
    console.print(
        f"{case}: {speed:.2f} times the speed (target {SPEED}), {peak:.2f} of the peak (target {PEAK}, "
        f"{found[OURS]['peak_above_start_bytes'] / GIGABYTE:.2f} GB): {'reached' if reached else 'NOT reached'}"
    )
    return reached


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vision", description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--turns", type=int, default=2, help="of each contestant [%(default)s]")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed [%(default)s]")
    parser.add_argument("--timed", type=int, default=6, help="steps that are [%(default)s]")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a run [%(default)s]")
    parser.add_argument("--no-record", dest="record", action="store_false", help="record nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
