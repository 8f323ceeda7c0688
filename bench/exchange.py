"""`python -m bench.exchange`: steps of two ranks with whole copies over a slow link, which is simulated.

The gradients of llama-22m are exchanged after backward, as before; in backward; and in backward with the embedding's by
rows, as lowtide does. Each exchange takes as long as a ring over a link of 1 Gbit/s would for the bytes that are sent;
everything else is as it is.
"""

import sys

from rich.console import Console

from bench.measuring.measure import hardware
from bench.measuring.results import EXCHANGE, versions, write
from bench.sharded.ranks import Case, parser_of_ranks, run_case, summary

GIGABITS = 1.0
LEAST_SPEED = 1.3
"""What is to be reached against an exchange after backward."""
WAYS = {
    "after backward": {"overlap": False, "by_rows": False},
    "in backward": {"overlap": True, "by_rows": False},
    "in backward, embedding by rows": {"overlap": True, "by_rows": True},
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where the target is missed."""
    options, console, case = parser_of_ranks(__doc__).parse_args(argv), Console(), Case("sft", "replicas")
    turns: dict[str, list] = {way: [] for way in WAYS}
    for turn in range(options.turns):
        for way, how in list(WAYS.items()) if turn % 2 == 0 else list(WAYS.items())[::-1]:
            console.print(f"{way}, turn {turn + 1}")
            turns[way].append(run_case(case, "lowtide", options, gigabits=GIGABITS, **how))
    found = {way: summary(each) for way, each in turns.items()}
    after, *others = (found[way]["seconds_per_step"] for way in WAYS)
    for way, seconds in zip([*WAYS][1:], others, strict=True):
        console.print(f"{way}: {after / seconds:.2f} times the speed, {seconds:.2f} s for {after:.2f} s a step")
    speed = after / others[-1]
    console.print(f"target {LEAST_SPEED}: {'reached' if speed >= LEAST_SPEED else 'NOT reached'}")
    if options.record:
        results = {"kind": EXCHANGE, "hardware": hardware("cpu"), "versions": versions(), "gigabits": GIGABITS}
        console.print(f"recorded in {write('exchange-llama-22m', {**results, 'ways': found})}")
    return 0 if speed >= LEAST_SPEED else 1


if __name__ == "__main__":
    sys.exit(main())
