"""A comparison as a table in the terminal, and whether it reached its targets."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from bench.compare.methods import METHODS
from bench.inputs.rows import CASES
from bench.measuring.measure import GIGABYTE
from bench.measuring.results import ratios

BASELINE, OURS = "trl", "lowtide"
BUSY = 0.7
"""Load average above which a machine is shared, and its times are not worth much."""
VOCABULARY_TARGET = 1.1
"""At most so many times what tensors hold beside the states at the smallest vocabulary."""
COLUMNS = (
    "s/step",
    "real tokens/s",
    "peak above start",
    "of matmul rate",
    "with recomputation",
    "against trl",
    "against its peer",
)


def print_comparison(results: dict[str, Any], console: Console) -> None:
    """Prints one table a case, and a line with the targets where the case has some for this device."""
    rate, hardware = results["matmul_flops_per_second"], results["hardware"]
    console.print(f"{hardware.get('gpu', hardware['cpu'])}, {results['dtype']} matmul {rate / 1e9:,.0f} GFLOP/s")
    for case, contestants in results["cases"].items():
        table = Table(
            Column(no_wrap=True), *COLUMNS, title=f"{METHODS[results['method']].title}, {case}, {results['shape']}"
        )
        for row in comparison_rows(results["method"], contestants):
            table.add_row(*row)
        console.print(table)
        console.print(verdict(results, case))
        for name in contestants:
            if "@" in name and OURS in contestants:
                speed, peak = ratios(contestants[OURS], contestants[name])
                console.print(f"{OURS} beside {name}: {speed:.2f}x the speed with {peak:.2f}x the peak")


def comparison_rows(method: str, contestants: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns a line of cells for each contestant, its name first."""
    rows = []
    for name, measured in contestants.items():
        known = METHODS[method].contestants.get(name)
        peer = known and known.against
        rows.append(
            [
                name,
                f"{measured['seconds_per_step']:.2f}",
                f"{measured['tokens_per_second']:,.0f}",
                f"{measured['peak_above_start_bytes'] / GIGABYTE:.2f} GB",
                f"{measured['matmul_share']:.0%}",
                f"{again:.0%}" if (again := measured.get("matmul_share_with_recomputation")) else "",
                against(measured, contestants.get(BASELINE) if name != BASELINE else None),
                against(measured, contestants.get(peer) if peer else None),
            ]
        )
    return rows


def against(measured: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None:
        return ""
    speed, peak = ratios(measured, other)
    return f"{speed:.2f}x, {peak:.2f}x"


def verdict(results: dict[str, Any], case: str) -> str:
    """Returns whether lowtide's defaults reached the case's targets against TRL's defaults; they are for CPUs."""
    contestants, target = results["cases"][case], CASES[results["method"]][case]
    if results["device"] != "cpu" or not {"lowtide", BASELINE} <= contestants.keys():
        return ""
    speed, peak = ratios(contestants["lowtide"], contestants[BASELINE])
    reached = speed >= target.speed_target and peak <= target.peak_target
    return (
        f"{'reached' if reached else 'NOT reached'}: {speed:.2f}x the speed (target {target.speed_target}x) "
        f"with {peak:.2f}x the peak (target {target.peak_target}x)"
    )


def growth(runs: list[dict[str, Any]]) -> tuple[float, bool]:
    """Returns how many times what tensors hold beside the states grows with the vocabulary, and whether it may."""
    times = runs[-1]["tensors_above_states_bytes"] / runs[0]["tensors_above_states_bytes"]
    return times, times <= VOCABULARY_TARGET


def vocabulary_verdict(runs: list[dict[str, Any]]) -> str:
    """Returns whether what tensors hold beside the states stays what it is at the smallest vocabulary."""
    times, reached = growth(runs)
    return (
        f"{'reached' if reached else 'NOT reached'}: {times:.2f}x beside the states (target at most "
        f"{VOCABULARY_TARGET}x) with {runs[-1]['vocabulary'] / runs[0]['vocabulary']:.0f}x the vocabulary"
    )
