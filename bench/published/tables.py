"""The tables of docs/predicted-and-measured.md."""

from collections.abc import Mapping
from typing import Any

from bench.measuring.processes import ROOT
from bench.measuring.results import dated
from bench.published.cases import CASES, GIB, TORCHTITAN, TORCHTUNE, UNSLOTH

WITHIN = 0.1
TITLES = {
    TORCHTUNE: "torchtune, Llama-3.1-8B",
    TORCHTITAN: "torchtitan, Llama-3.1-8B on 8 H100",
    UNSLOTH: "Unsloth",
}
PAGE = ROOT / "docs" / "predicted-and-measured.md"
MARK, END = "<!-- published: written by `make docs` from bench/results -->", "<!-- /published -->"


def missed(run: Mapping[str, Any]) -> bool:
    """Whether a difference is too large, and unexplained."""
    case = CASES[run["case"]]
    return case.strict and not case.differs and abs(difference(run)) > WITHIN


def difference(run: Mapping[str, Any]) -> float:
    """Of the prediction, as a share of what is published."""
    return run["predicted_bytes"] / run["published_bytes"] - 1


def cells(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a table's row."""
    case = CASES[run["case"]]
    unit = "GiB" if case.unit == GIB else "GB"
    largest = sorted(run["held"].items(), key=lambda each: -each[1])[:3]
    return (
        run["case"],
        f"{case.published:g} {unit}",
        f"{run['predicted_bytes'] / case.unit:.1f} {unit}",
        f"{difference(run):+.0%}",
        ", ".join(f"{name} {size / case.unit:.1f}" for name, size in largest),
        case.differs or "settings are the same",
    )


def tables(result: Mapping[str, Any]) -> list[str]:
    """The lines of the page's tables."""
    lines = []
    for source, title in TITLES.items():
        runs = [run for run in result["runs"] if run["case"] in CASES and CASES[run["case"]].source == source]
        lines += ["", f"### {title}", "", f"Source: <{source}>", ""]
        lines += ["| | published | predicted for lowtide | difference | most of the prediction | settings |"]
        lines += ["|---|---:|---:|---:|---|---|", *(f"| {' | '.join(cells(run))} |" for run in runs)]
    return [*lines, "", f"{dated(result['versions'])}. From `python -m bench.published`.", ""]
