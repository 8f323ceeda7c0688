"""`python -m bench.sharded`: steps over ranks with sharded weights, beside TRL's with the same engine.

Both libraries train the same model from the same files on the same rows of gsm8k, each rank in a process of its own
with one thread. FSDP2 is lowtide's `fsdp=True`; TRL has it on a CPU by a model that transformers shards as it loads
(accelerate's own FSDP wants a GPU). The peak is that of the rank that holds most, of its resident memory while it
trains, above what it held with its libraries imported; what loading took is recorded beside it.

Beside them lowtide's ranks are run at once and apart, each with whole weights and its share of the rows, and exchange
nothing. It is what any exchange can come to at most.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from bench.cases import CASES as METHOD_CASES
from bench.measure import hardware
from bench.processes import PORT, ChildFailed, run_ranks
from bench.results import SHARDED, over_earlier, versions, write
from bench.sharded_child import APART
from bench.tokenizer import tokenizer_for

NAME = "sharded-llama-22m"
CONTESTANTS = ("trl", "lowtide", APART)
ROWS = "gsm8k"
"""The case of each method whose rows are trained on."""
LEAST_SPEED, MOST_MEMORY = 2.5, 0.4
"""What is to be reached against TRL."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is spread."""

    method: str
    engine: str
    """"fsdp2", "zero3", "replicas" or "apart"."""
    ranks: int = 2
    shape: str = "llama-22m"
    rows: int = 8
    """Of a step, over all ranks."""


CASES = {
    "SFT, FSDP2": Case("sft", "fsdp2"),
    "DPO, FSDP2": Case("dpo", "fsdp2"),
    "SFT, ZeRO-3": Case("sft", "zero3"),
    "DPO, ZeRO-3": Case("dpo", "zero3"),
    "SFT, FSDP2, 4 ranks": Case("sft", "fsdp2", ranks=4),
}


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


def run_case(case: Case, contestant: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What the ranks of one run measured: the slowest, and the one that held most.

    Args:
        more: for the child, see `bench.sharded_child`.
    """
    with tempfile.TemporaryDirectory() as folder:
        who = {"contestant": "lowtide", "engine": APART} if contestant == APART else {"contestant": contestant}
        spec = {**asdict(case), **who, "folder": folder, **more}
        spec["tokenizer"] = str(tokenizer_for(METHOD_CASES[case.method][ROWS].rows()))
        spec |= {"warmup": options.warmup, "timed": options.timed}
        found = results_of_ranks(spec, options)
    seconds = [max(each) for each in zip(*(rank["step_seconds"] for rank in found), strict=True)]
    most = {name: max(rank[name] for rank in found) for name in ("peak_above_start_bytes", "loading_bytes")}
    return {"step_seconds": seconds, **most}


def results_of_ranks(
    spec: dict[str, Any], options: argparse.Namespace, module: str = "bench.sharded_child"
) -> list[dict[str, Any]]:
    """What each of `spec["ranks"]` processes of a child's module says; see `bench.processes.run_ranks`."""
    return run_ranks(spec, spec["ranks"], module, options.timeout, port=options.port)


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median seconds of a step, and the highest peak of the turns."""
    return {
        "seconds_per_step": statistics.median(statistics.mean(each["step_seconds"]) for each in turns),
        "peak_above_start_bytes": max(each["peak_above_start_bytes"] for each in turns),
        "turns": turns,
    }


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


def parser_of_ranks(doc: str | None) -> argparse.ArgumentParser:
    """With the options of every benchmark over ranks."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2, help="of each contestant [%(default)s]")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed [%(default)s]")
    parser.add_argument("--timed", type=int, default=4, help="steps that are [%(default)s]")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a run [%(default)s]")
    parser.add_argument("--port", type=int, default=PORT, help="at which ranks meet [%(default)s]")
    parser.add_argument("--no-record", dest="record", action="store_false", help="record nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
