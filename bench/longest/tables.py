"""What `bench.longest` found, as tables."""

from typing import Any

from bench.measuring.measure import GIGABYTE
from bench.measuring.processes import ROOT
from bench.measuring.results import dated

PAGE = ROOT / "docs" / "chains.md"
MARK, END = "<!-- longest: written by `make docs` from bench/results -->", "<!-- /longest -->"
PUBLISHED_LENGTHS = {
    "ALST, Llama-3.1-8B, all weights, one H100": (500_000, "https://arxiv.org/abs/2506.13996"),
    "MegaTrain, a 7B, all weights, one GH200": (512_000, "https://arxiv.org/abs/2604.05091"),
}
"""Tokens, and who says so."""


def pieces_cells(run: dict[str, Any]) -> list[str]:
    """What is predicted of a row in pieces, for a table."""
    return [
        run["case"].removeprefix("in pieces, "),
        f"{run['tokens']:,}" if run["fits"] else f"{run['tokens']:,} do not fit",
        f"{run['peak_bytes'] / GIGABYTE:.1f} GB",
        f"{run['host_bytes'] / GIGABYTE:,.0f} GB",
        f"{run['seconds']:,.0f} s" if run["seconds"] else "not known",
    ]


def pieces_lines(results: dict[str, Any]) -> list[str]:
    """The longest rows in pieces, for their page, beside those that others report."""
    runs = results["runs"]
    theirs = (
        f"| [{name}]({source}), reported by its authors | {tokens:,} | | | |"
        for name, (tokens, source) in PUBLISHED_LENGTHS.items()
    )
    return [
        "",
        "| | tokens | peak of the GPU | the host holds | a step |",
        "|---|---:|---:|---:|---:|",
        *(f"| {run['device']}, predicted: {' | '.join(pieces_cells(run))} |" for run in runs),
        *theirs,
        "",
        f"{dated(runs[-1]['versions'])}. From `python -m bench.longest`.",
        "",
    ]


def cells(run: dict[str, Any]) -> list[str]:
    """Name and lengths of a run, for a table."""
    return [run["case"], *(f"{run[name]:,}" if name in run else "" for name in ("predicted", "trained", "failed"))]
