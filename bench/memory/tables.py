"""What `bench.memory` found, as a table."""

from typing import Any

from bench.measuring.measure import GIGABYTE


def cells(run: dict[str, Any]) -> list[str]:
    """Name, peak and seconds of a run, for a table."""
    if "peak_bytes" not in run:
        return [run["case"], run.get("failed") or run["skipped"], ""]
    reserved = f" ({run['reserved_bytes'] / GIGABYTE:.2f} reserved)" if run["reserved_bytes"] else ""
    seconds = f"{run['step_seconds']:.1f}" if "step_seconds" in run else ""
    return [run["case"], f"{run['peak_bytes'] / GIGABYTE:.2f} GB{reserved}", seconds]
