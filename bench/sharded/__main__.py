"""`python -m bench.sharded`: steps over ranks with sharded weights, beside TRL's with the same engine.

Both libraries train the same model from the same files on the same rows of gsm8k, each rank in a process of its own
with one thread. FSDP2 is lowtide's `fsdp=True`; TRL has it on a CPU by a model that transformers shards as it loads
(accelerate's own FSDP wants a GPU). The peak is that of the rank that holds most, of its resident memory while it
trains, above what it held with its libraries imported; what loading took is recorded beside it.

Beside them lowtide's ranks are run at once and apart, each with whole weights and its share of the rows, and exchange
nothing. It is what any exchange can come to at most.
"""

import argparse
import sys
from typing import Any

from rich.console import Console

from bench.measuring.measure import hardware
from bench.measuring.processes import ChildFailed
from bench.measuring.results import SHARDED, over_earlier, versions, write
from bench.sharded.cases import CASES, CONTESTANTS, LEAST_SPEED, MOST_MEMORY
from bench.sharded.ranks import parser_of_ranks, run_case, summary

NAME = "sharded-llama-22m"


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    options, console = parse(argv), Console()
    found: dict[str, dict[str, Any]] = {}
    reached = True
    for name in options.cases:
        turns: dict[str, list[dict[str, Any]]] = {each: [] for each in CONTESTANTS}
        for turn in range(options.turns):
            for contestant in CONTESTANTS if turn % 2 == 0 else CONTESTANTS[::-1]:
                console.print(f"{name}: {contestant}, turn {turn + 1}")
                try:
                    turns[contestant].append(run_case(CASES[name], contestant, options))
                except ChildFailed as failure:
                    console.print(failure.reason, *failure.last_lines, sep="\n", markup=False, highlight=False)
                    return 1
        found[name] = {contestant: summary(each) for contestant, each in turns.items()}
        reached &= report(name, found[name], console)
    if options.record:
        results = {"kind": SHARDED, "hardware": hardware("cpu"), "versions": versions()}
        results["cases"] = over_earlier(NAME, results["hardware"], "cases", found)
        console.print(f"recorded in {write(NAME, results)}")
    return 0 if reached else 1


def report(name: str, found: dict[str, dict[str, Any]], console: Console) -> bool:
    """Prints a case against TRL, and whether its targets are reached."""
    theirs, ours, apart = (found[each] for each in CONTESTANTS)
    speed = theirs["seconds_per_step"] / ours["seconds_per_step"]
    memory = ours["peak_above_start_bytes"] / theirs["peak_above_start_bytes"]
    reached = speed >= LEAST_SPEED and memory <= MOST_MEMORY
    console.print(
        f"{name}: {speed:.2f} times TRL's speed (target {LEAST_SPEED}), {memory:.3f} of its peak a rank (target "
        f"{MOST_MEMORY}; {ours['peak_above_start_bytes'] / 1e6:.0f} for {theirs['peak_above_start_bytes'] / 1e6:.0f} "
        f"MB); {ours['seconds_per_step']:.2f} s for {theirs['seconds_per_step']:.2f} s a step, "
        f"{apart['seconds_per_step']:.2f} s if nothing were exchanged "
        f"({theirs['seconds_per_step'] / apart['seconds_per_step']:.2f} times): "
        f"{'reached' if reached else 'NOT reached'}"
    )
    return reached


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of_ranks(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
