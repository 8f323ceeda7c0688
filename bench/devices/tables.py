"""The tables of docs/plan.md."""

from typing import Any

from bench.devices.cases import LENGTH, MODELS, ROW, ROWS, TRL_GB, TRL_SECONDS, TRL_SOURCE, TRL_TOKENS
from bench.measuring.measure import GIGABYTE
from bench.measuring.processes import ROOT
from bench.measuring.results import dated

PAGE = ROOT / "docs" / "plan.md"
MARKS = {
    "tables": ("<!-- tables: written by `make docs` from bench/results -->", "<!-- /tables -->"),
    "row": ("<!-- row: written by `make docs` from bench/results -->", "<!-- /row -->"),
}


def cells(run: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """A run's cells in a table; `before` is the smallest number of devices that the model fits."""
    if "refused" in run:
        least = (
            f"nothing fits; at least {run['least_bytes'] / GIGABYTE:,.0f} GB each"
            if run["least_bytes"]
            else "nothing fits"
        )
        return [f"{run['devices']:,}", least, "", "", "", "", ""]
    shown = {name: value for name, value in run["settings"].items() if name not in SAID_BY_WAY}
    settings = ", ".join(f"`{name}={value!r}`" for name, value in shown.items()) or "the defaults"
    host = f"{run['host_bytes'] / GIGABYTE:,.0f} GB" if run["host_bytes"] else "nothing"
    cost = "1.00" if before is None else f"{device_seconds(run) / device_seconds(before):.2f}"
    return [
        f"{run['devices']:,}",
        run["way"],
        settings,
        f"{run['peak_bytes'] / GIGABYTE:.1f} GB",
        f"{host}, {run['loading_bytes'] / GIGABYTE:,.0f} GB",
        f"{run['tokens_per_second']:,.0f}",
        cost,
    ]


SAID_BY_WAY = ("fsdp", "fsdp_config", "parallelism_config")
"""Settings that the name of a way says already."""


def device_seconds(run: dict[str, Any]) -> float:
    """Of a token."""
    return run["devices"] / run["tokens_per_second"]


def tables(results: dict[str, Any]) -> list[str]:
    """Returns a table for each model, a row for each number of devices."""
    lines = []
    for model in MODELS:
        runs = sorted((run for run in results["runs"] if run["case"] == model), key=lambda run: run["devices"])
        if not runs:
            continue
        first = next((run for run in runs if "refused" not in run), None)
        lines += [
            "",
            f"**{model}**, {ROWS} rows of {LENGTH:,} tokens a device:",
            "",
            "| H100 | engine and degrees | settings | peak each | a node's host: training, loading | tokens/s | cost |",
            "|---:|---|---|---:|---:|---:|---:|",
            *(f"| {' | '.join(cells(run, first))} |" for run in runs),
        ]
    return [*lines, "", f"{dated(results['runs'][-1]['versions'])}. From `python -m bench.devices`.", ""]


def row_cells(run: dict[str, Any]) -> list[str]:
    """The cells of a long row in a table."""
    piece = run["options"].get("tokens_per_microbatch")
    pieces = f", in pieces of {piece:,} tokens" if piece else ""
    return [
        f"lowtide, {run['weights']} weights{pieces}, predicted",
        f"{run.get('tokens', ROW):,}",
        f"{run['peak_bytes'] / GIGABYTE:.1f} GB",
        f"{run['host_bytes'] / GIGABYTE:,.0f} GB",
        f"{run['seconds']:,.0f} s",
    ]


def row_section(results: dict[str, Any]) -> list[str]:
    """Returns the lines of the page on the long row, beside what TRL says of its own."""
    runs = sorted((run for run in results["runs"] if "weights" in run), key=lambda run: run.get("tokens", ROW))
    theirs = f"TRL, [measured by its authors]({TRL_SOURCE})"
    return [
        "",
        "| | tokens | peak a device | the host holds | a step |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row_cells(run))} |" for run in runs),
        f"| {theirs} | {TRL_TOKENS:,} | {TRL_GB} GB | not said | {TRL_SECONDS} s |",
        "",
        f"{dated(runs[-1]['versions'])}. From `python -m bench.devices`.",
        "",
    ]
