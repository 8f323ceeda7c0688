"""Runs cases over ranks, with the options that every such benchmark has."""

import argparse
import statistics
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from bench.inputs.rows import CASES as METHOD_CASES
from bench.inputs.tokenizer import tokenizer_for
from bench.measuring.arguments import parser_of
from bench.measuring.processes import PORT, run_ranks
from bench.sharded.child import APART

ROWS = "gsm8k"
"""The case of each method whose rows are trained on."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is spread."""

    method: str
    engine: str
    """"fsdp2", "zero2", "zero3", "replicas" or "apart"."""
    ranks: int = 2
    shape: str = "llama-22m"
    rows: int = 8
    """Of a step, over all ranks."""


def run_case(case: Case, contestant: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What the ranks of one run measured: the slowest, and the one that held most.

    Args:
        more: for the child, see `bench.sharded.child`.
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
    spec: dict[str, Any], options: argparse.Namespace, module: str = "bench.sharded.child"
) -> list[dict[str, Any]]:
    """What each of `spec["ranks"]` processes of a child's module says; see `bench.measuring.processes.run_ranks`."""
    return run_ranks(spec, spec["ranks"], module, options.timeout, port=options.port)


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median seconds of a step, and the highest peak of the turns."""
    return {
        "seconds_per_step": statistics.median(statistics.mean(each["step_seconds"]) for each in turns),
        "peak_above_start_bytes": max(each["peak_above_start_bytes"] for each in turns),
        "turns": turns,
    }


def parser_of_ranks(doc: str | None) -> argparse.ArgumentParser:
    """With the options of every benchmark over ranks."""
    parser = parser_of(doc)
    parser.add_argument("--turns", type=int, default=2, help="of each contestant [%(default)s]")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed [%(default)s]")
    parser.add_argument("--timed", type=int, default=4, help="steps that are [%(default)s]")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a run [%(default)s]")
    parser.add_argument("--port", type=int, default=PORT, help="at which ranks meet [%(default)s]")
    parser.add_argument("--no-record", dest="record", action="store_false", help="record nothing")
    return parser
