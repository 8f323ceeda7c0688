"""`python -m bench.gathering`: how fast two ranks write completions with a policy that FSDP2 shards.

The policy is gathered whole while they write (`ds3_gather_for_generation=True`), or a layer at a time in each forward
(`False`), or as far as half its bytes go. The tokens are the same. Ways take turns in the same processes; tokens/s are
those of all ranks over the time of the slowest, medians of the turns.
"""

import statistics
import sys
from typing import Any

from rich.console import Console

from bench.gathering.child import HALF, LAYERS, WHOLE
from bench.measuring.measure import hardware
from bench.measuring.results import GATHERING, versions, write
from bench.sharded.ranks import parser_of_ranks, results_of_ranks

LEAST_SPEED = 5.0
"""What is to be reached by a policy that is gathered whole, against one that is gathered layer by layer."""
RANKS = 2


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where the target is missed."""
    options, console = parser_of_ranks(__doc__).parse_args(argv), Console()
    ranks = results_of_ranks({"ranks": RANKS, "turns": options.turns}, options, "bench.gathering.child")
    found: dict[str, Any] = {}
    for way in (WHOLE, LAYERS, HALF):
        tokens = sum(rank["tokens"] for rank in ranks)
        seconds = [max(each) for each in zip(*(rank["seconds"][way] for rank in ranks), strict=True)]
        found[way] = {"tokens_per_second": tokens / statistics.median(seconds), "turns": seconds}
        console.print(f"{way}: {found[way]['tokens_per_second']:,.0f} tokens/s")
    speed = found[WHOLE]["tokens_per_second"] / found[LAYERS]["tokens_per_second"]
    verdict = "reached" if speed >= LEAST_SPEED else "NOT reached"
    console.print(f"whole: {speed:.2f} times the speed of layer by layer (target {LEAST_SPEED}): {verdict}")
    if options.record:
        results = {"kind": GATHERING, "hardware": hardware("cpu"), "versions": versions(), "ways": found}
        console.print(f"recorded in {write('gathering-llama-22m', results)}")
    return 0 if speed >= LEAST_SPEED else 1


if __name__ == "__main__":
    sys.exit(main())
