"""Sections of docs/benchmarks.md for what is measured beside other libraries' trainers: tasks, and steps over ranks."""

from collections.abc import Mapping
from typing import Any

from bench.measuring.measure import GIGABYTE
from bench.measuring.results import dated, described
from bench.sharded import cases as sharded
from bench.sharded.child import APART
from bench.tasks import cases as tasks

HEADER = ["| | | speed | peak | against it | to reach | |", "|---|---|---:|---:|---:|---:|---|"]
Measured = Mapping[str, Any]


def tasks_section(results: Measured) -> str:
    """Tasks beside transformers' Trainer."""
    rows = []
    for task, found in results["tasks"].items():
        target, ours = tasks.TARGETS[task], found[tasks.OURS]
        for peer, least, most in (
            (tasks.PLAIN, target.speed, target.peak),
            (tasks.GROUPED, tasks.LEAST_BESIDE_GROUPED, None),
        ):
            rows.append(_row(task, peer, found[peer], least, most, ours))
        rows.append(_row(task, tasks.OURS, ours))
    intro = (
        "Small models on rows whose lengths have a long tail, 16 a step, float32, beside transformers' Trainer with "
        "its default collators, which pad a batch to its longest row. With `group_by_length` rows of like lengths meet "
        "in a batch. Each library has its own defaults."
    )
    return _section("Tasks of transformers' Trainer", intro, rows, results, "python -m bench.tasks")


def sharded_section(results: Measured) -> str:
    """Steps over ranks beside TRL's."""
    rows = []
    for case, found in results["cases"].items():
        theirs, ours = found["trl"], found["lowtide"]
        rows.append(_row(case, "trl", theirs, sharded.LEAST_SPEED, sharded.MOST_MEMORY, ours))
        rows.append(_row(case, "lowtide", ours))
        if apart := found.get(APART):
            rows.append(_bound(case, apart, theirs))
    intro = (
        "llama-22m on gsm8k, 8 rows a step over all ranks, each rank a process with one thread, over gloo. Both "
        "libraries use the same engine and settings. The peak is that of the rank that holds most. What "
        "ranks send each other takes time of the two cores that compute."
    )
    if any(APART in found for found in results["cases"].values()):
        intro += (
            " In the last line of a case the ranks run at once with whole weights, each on its share of the rows, and "
            "exchange nothing: no exchange is faster."
        )
    return _section("Over ranks, beside TRL", intro, rows, results, "python -m bench.sharded")


def _row(
    what: str,
    who: str,
    found: Measured,
    least: float | None = None,
    most: float | None = None,
    ours: Measured | None = None,
) -> str:
    """A contestant; a peer has lowtide's numbers divided by its own beside what they are to be."""
    speed, text = _speed(found)
    cells = [what, who, text, f"{found['peak_above_start_bytes'] / GIGABYTE:.2f} GB"]
    if ours is None or least is None:
        return f"| {' | '.join(cells)} | | | |"
    faster = _speed(ours)[0] / speed
    smaller = ours["peak_above_start_bytes"] / found["peak_above_start_bytes"]
    reached = faster >= least and (most is None or smaller <= most)
    wanted = f"{least}x" if most is None else f"{least}x, {most}x"
    cells += [f"{faster:.2f}x, {smaller:.2f}x", wanted, "reached" if reached else "not reached"]
    return f"| {' | '.join(cells)} |"


def _bound(case: str, apart: Measured, theirs: Measured) -> str:
    """What ranks come to that exchange nothing."""
    speed, text = _speed(apart)
    return f"| {case} | lowtide, nothing exchanged | {text} | | {speed / _speed(theirs)[0]:.2f}x | | |"


def _speed(found: Measured) -> tuple[float, str]:
    if "tokens_per_second" in found:
        return found["tokens_per_second"], f"{found['tokens_per_second']:,.0f} tokens/s"
    return 1 / found["seconds_per_step"], f"{found['seconds_per_step']:.2f} s/step"


def _section(title: str, intro: str, rows: list[str], results: Measured, command: str) -> str:
    measured = f"{described(results['hardware'])}. {dated(results['versions'])}. Measured with `{command}`."
    return "\n".join([f"## {title}", "", intro, "", *HEADER, *rows, "", measured, ""])
