"""`python -m bench.online`: steps of GRPO beside TRL's, whole and of the update alone.

Both libraries train the same model (llama-22m) on the same prompts with their defaults: 8 completions a micro-batch,
4 of a prompt, of at most 32 tokens. In the whole step the policy writes them, to their full length, since a model
with random weights seldom ends one. In the update alone a `rollout_func` gives both libraries the same completions. The
reward costs nothing. Contestants take turns, each in a process of its own; the peak is that of the run above the start.
With `--against COMMIT` the lowtide of that commit takes turns with them.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench.measuring.measure import hardware
from bench.measuring.other_commits import AGAINST, source_of
from bench.measuring.processes import ChildFailed, run_child
from bench.measuring.results import ONLINE, versions, write
from bench.online.cases import CASES as PROMPTS

SHAPE = "llama-22m"
CONTESTANTS = ("trl", "lowtide")


@dataclass(frozen=True)
class Case:
    """What is trained, and what is to be reached against TRL."""

    prompts: str
    update_alone: bool
    speed: float
    peak: float
    completions: int = 4
    rows: int = 8


CASES = {
    "gsm8k": Case("gsm8k", False, 3.0, 0.2),
    "longtail": Case("longtail", False, 3.0, 0.2),
    "gsm8k, update alone": Case("gsm8k", True, 4.0, 0.15),
    "longtail, update alone": Case("longtail", True, 4.0, 0.15),
    "16 completions of 1,000 tokens of prompt": Case("long", False, 8.0, 0.1, completions=16, rows=16),
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a target is missed."""
    options, console = parse(argv), Console()
    with source_of(options.against) as before:
        found = {name: measure(name, options, before, console) for name in options.cases}
    reached = [report(name, runs, console) for name, runs in found.items()]
    if options.record:
        results = {"kind": ONLINE, "shape": SHAPE, "hardware": hardware("cpu"), "versions": versions(), "cases": found}
        console.print(f"recorded in {write(f'grpo-{SHAPE}', results)}")
    return 0 if all(reached) else 1


def measure(
    name: str, options: argparse.Namespace, before: dict[str, str], console: Console
) -> dict[str, dict[str, Any]]:
    """Returns by contestant the median seconds of a step, and the highest peak of its turns; `before` is what a child
    of the other commit's has in its environment."""
    case = CASES[name]
    contestants = [*CONTESTANTS, *([f"lowtide@{options.against}"] if options.against else [])]
    turns: dict[str, list[dict[str, Any]]] = {each: [] for each in contestants}
    for turn in range(options.turns):
        for contestant in contestants if turn % 2 == 0 else contestants[::-1]:
            package, _, commit = contestant.partition("@")
            environment = before if commit else {}
            spec = {"contestant": package, "shape": SHAPE, "steps": options.warmup + options.timed}
            spec |= {"prompts": case.prompts, "update_alone": case.update_alone, "warmup": options.warmup}
            spec |= {"completions": case.completions, "rows": case.rows}
            console.print(f"{name}: {contestant}, turn {turn + 1}")
            try:
                run = run_child(spec, lambda step: None, options.timeout, "bench.online.child", environment)
                turns[contestant].append(run)
            except ChildFailed as error:
                console.print("\n".join(error.last_lines))
                raise SystemExit(f"{name}: {contestant}: {error.reason}") from None
    return {
        contestant: {
            "seconds_per_step": statistics.median(statistics.mean(each["step_seconds"]) for each in runs),
            "peak_above_start_bytes": max(each["above_start_bytes"] for each in runs),
            "turns": runs,
        }
        for contestant, runs in turns.items()
    }


def report(name: str, runs: dict[str, Any], console: Console) -> bool:
    """Prints the ratios; returns whether both targets are reached."""
    theirs, ours, case = runs["trl"], runs["lowtide"], CASES[name]
    speed = theirs["seconds_per_step"] / ours["seconds_per_step"]
    peak = ours["peak_above_start_bytes"] / theirs["peak_above_start_bytes"]
    reached = speed >= case.speed and peak <= case.peak
    for contestant, other in runs.items():
        if "@" in contestant:
            times = other["seconds_per_step"] / ours["seconds_per_step"]
            share = ours["peak_above_start_bytes"] / other["peak_above_start_bytes"]
            console.print(f"{name}: lowtide beside {contestant}: {times:.2f}x the speed with {share:.2f}x the peak")
    console.print(
        f"{name}: {speed:.2f} times TRL's speed (target {case.speed}), {peak:.3f} of its peak (target {case.peak}); "
        f"{ours['seconds_per_step']:.2f} s for {theirs['seconds_per_step']:.2f} s a step: "
        f"{'reached' if reached else 'NOT reached'}"
    )
    return reached


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.online", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--turns", type=int, default=2, help="of each contestant [%(default)s]")
    parser.add_argument("--against", metavar="COMMIT", help=AGAINST)
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not timed [%(default)s]")
    parser.add_argument("--timed", type=int, default=3, help="steps that are [%(default)s]")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a child [%(default)s]")
    parser.add_argument("--no-record", dest="record", action="store_false", help="record nothing")
    assert set(PROMPTS) >= {case.prompts for case in CASES.values()}
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
