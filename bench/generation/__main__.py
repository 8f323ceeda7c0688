"""`python -m bench.generation`: how fast completions are written, beside transformers.

A llama of 22 million parameters in float32, 8 prompts of 40 to 300 tokens, 4 completions of each, of 8 to 128 tokens.
Each contestant writes completions of the same lengths, which a hook sets: a model with random weights never comes to an
end by itself.
Contestants take turns in one process, so that a machine that slows down slows all. Tokens/s are those of completions
over the time of the whole call, prompts included; medians of the turns. Continuous batching is compared on completions
of 8 tokens at most, in one turn. lowtide's own generator gives log-probabilities
with the tokens, transformers' gives tokens alone.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from rich.console import Console

from bench.generation.contestants import Write, asked, continuous, generate, ours
from bench.measuring.measure import hardware
from bench.measuring.results import GENERATION, versions, write

SUMMARY = "Measure how fast completions are written, beside transformers."
OURS, GENERATE, CONTINUOUS = "lowtide", "transformers generate", "transformers continuous batching"
SAMPLED, GREEDY, SHORT = "sampled", "greedy", "sampled, short"
SHORT_MOST = 8
"""Tokens of a completion beside continuous batching, which takes seconds for each on a CPU."""
TARGETS = {(SAMPLED, GENERATE): 3.0, (GREEDY, GENERATE): 2.5, (SHORT, CONTINUOUS): 6.0}
"""How many times another's tokens a second lowtide is to write."""


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    options, console = parse(argv), Console()
    runs = measure(options, console)
    reached = [report(runs, way, other, target, console) for (way, other), target in TARGETS.items()]
    if options.record:
        results = {"kind": GENERATION, "runs": runs, "hardware": hardware("cpu"), "versions": versions()}
        console.print(f"recorded in {write('generation-llama-22m', results)}")
    return 0 if all(reached) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=SUMMARY)
    parser.add_argument("--turns", type=int, default=5, help="calls of each contestant (default: 5)")
    parser.add_argument(
        "--without-continuous", action="store_true", help="leave continuous batching out, which is slow"
    )
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Returns the tokens a second of each contestant, sampled and greedy, by turn."""
    prompts, lengths = asked()
    short = [min(length, SHORT_MOST) for length in lengths]
    both = {OURS: ours(prompts, lengths), GENERATE: generate(prompts, lengths)}
    runs = [*turns_of(SAMPLED, both, sum(lengths), options.turns), *turns_of(GREEDY, both, sum(lengths), options.turns)]
    if not options.without_continuous:
        both = {OURS: ours(prompts, short), CONTINUOUS: continuous(prompts, short)}
        runs += turns_of(SHORT, both, sum(short), 1)
    for run in runs:
        console.print(f"{run['way']}: {run['contestant']}: {run['tokens_per_second']:,.1f} tokens/s")
    return runs


def turns_of(way: str, contestants: dict[str, Write], tokens: int, turns: int) -> list[dict[str, Any]]:
    """Returns the tokens a second of each contestant; the first turn, which warms up, does not count."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns + 1):
        for name, write_all in contestants.items():
            if name == CONTINUOUS and rates[CONTINUOUS]:
                continue
            began = time.perf_counter()
            written = write_all(0.0 if way == GREEDY else 1.0)
            rates[name].append(tokens / (time.perf_counter() - began))
            assert written == tokens, f"{name} wrote {written} tokens, not {tokens}"
    kept = {name: each[1:] or each for name, each in rates.items()}
    return [
        {"way": way, "contestant": name, "tokens_per_second": statistics.median(each), "turns": each}
        for name, each in kept.items()
    ]


def report(runs: list[dict[str, Any]], way: str, other: str, target: float, console: Console) -> bool:
    """Prints how many times another's rate lowtide has; returns whether that is the target."""
    rates = {run["contestant"]: run["tokens_per_second"] for run in runs if run["way"] == way}
    if other not in rates:
        return True
    ratio = rates[OURS] / rates[other]
    verdict = "reached" if ratio >= target else "NOT reached"
    console.print(f"{way}: {ratio:.2f} times {other}, target {target:.1f}: {verdict}")
    return ratio >= target


if __name__ == "__main__":
    sys.exit(main())
