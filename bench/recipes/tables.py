"""The table of docs/recipes.md."""

from typing import Any

from bench.measuring.processes import ROOT
from bench.measuring.results import dated
from bench.recipes.cases import GIB, RECIPES_BY_FILE

PAGE = ROOT / "docs" / "recipes.md"
MARK, END = "<!-- written by `make docs` from bench/results -->", "<!-- /recipes -->"


def lines(results: dict[str, Any]) -> list[str]:
    """Returns the table of docs/recipes.md."""
    runs = {run["case"]: run for run in results["runs"]}
    rows = [cells(name, runs[name]) for name in RECIPES_BY_FILE if name in runs]
    return [
        "",
        "| recipe | device | predicted peak | the largest parts | in host memory |",
        "|---|---|---:|---|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"{dated(results['runs'][-1]['versions'])}. From `python -m bench.recipes`; predicted, not measured.",
        "",
    ]


def cells(name: str, run: dict[str, Any]) -> list[str]:
    """Returns a recipe's cells in the table."""
    largest = sorted(run["held"].items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in largest)
    memory = f"{run['memory_bytes'] / GIB:.1f} GiB"
    device = "a CPU" if run["device"] == "cpu" else run["device"]
    where = f"8 x {device}" if run["devices"] > 1 else "a GPU of 8 GB" if name.endswith("-8gb") else device
    host = f"{run['host_bytes'] / 1e9:,.0f} GB" if run["host_bytes"] else ""
    return [f"[{run['title']}](#{name})", f"{where}, {memory}", f"**{run['peak_bytes'] / GIB:.1f} GiB**", parts, host]
