"""The charts of docs/benchmarks.md, from the recorded results that its tables are from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.compare.methods import METHODS
from bench.docs.charts import Bar, Group, bar_chart
from bench.measuring.measure import GIGABYTE, where_measured
from bench.measuring.processes import ROOT

FOLDER = ROOT / "docs" / "charts"
SIDES = ("trl", "lowtide")
"""The contestants with their defaults, in the order of their colours."""
SERIES = ("TRL 1.16, its defaults", "lowtide, its defaults")


def write_charts(comparisons: list[dict[str, Any]], estimates: list[dict[str, Any]]) -> list[str]:
    """Writes the charts as SVG; returns the lines that show them on the page."""
    charts = comparison_charts(comparisons)
    for gpu, name in ((False, "predicted"), (True, "predicted-gpu")):
        charts |= estimate_chart(name, [each for each in estimates if ("gpu" in each["hardware"]) == gpu])
    FOLDER.mkdir(exist_ok=True)
    for name, (_, svg) in charts.items():
        Path(FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")
    return [line for name, (said, _) in charts.items() for line in (f"![{said}](charts/{name}.svg)", "")]


def comparison_charts(comparisons: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Returns the charts of speed and of memory beside TRL, each with what it says in words."""
    cases = [
        (
            f"{METHODS[result['method']].title}, {case}, {where_measured(result['hardware'])}",
            [contestants[side] for side in SIDES],
        )
        for result in comparisons
        for case, contestants in result["cases"].items()
        if set(SIDES) <= contestants.keys()
    ]
    if not cases:
        return {}
    speed = [
        Group(name, [Bar(rate, f"{rate:,.0f}", i) for i, rate in enumerate(each["tokens_per_second"] for each in both)])
        for name, both in cases
    ]
    memory = [
        Group(name, [_gigabytes(each["peak_above_start_bytes"], i) for i, each in enumerate(both)])
        for name, both in cases
    ]
    return {
        "speed": (
            "Real tokens a second of TRL and lowtide by method and data; the tables below have the same numbers",
            bar_chart("Real tokens a second (more is better)", SERIES, speed),
        ),
        "memory": (
            "Peak memory above the start of TRL and lowtide by method and data; the tables below have the same numbers",
            bar_chart("Peak memory above the start (less is better)", SERIES, memory),
        ),
    }


def estimate_chart(name: str, estimates: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Returns the chart of predicted and measured peaks: the largest of each method."""
    largest: dict[str, Mapping[str, Any]] = {}
    for run in (run for result in estimates for run in result["runs"]):
        method = run["case"].split()[0]
        if method not in largest or run["measured_bytes"] > largest[method]["measured_bytes"]:
            largest[method] = run
    if not largest:
        return {}
    groups = [
        Group(run["case"], [_gigabytes(run["predicted_bytes"], 0), _gigabytes(run["measured_bytes"], 1)])
        for run in largest.values()
    ]
    where = _on_gpu(estimates[0])
    said = f"Predicted and measured peaks{where}: of each method the run with the largest; the tables below have all"
    title = f"Peak of torch's allocator{where}" if where else "Peak of the process"
    return {name: (said, bar_chart(title, ("predicted", "measured"), groups))}


def _on_gpu(result: Mapping[str, Any]) -> str:
    """Where a result was measured, if that is a GPU."""
    gpu = result["hardware"].get("gpu")
    return f", {gpu}" if gpu else ""


def _gigabytes(size: float, series: int) -> Bar:
    return Bar(size, f"{size / GIGABYTE:.2f} GB", series)
