"""When each suite of tests last passed: records in bench/results/, a file a suite, and the table of docs/tests.md.

`make test RECORD=1`, and so each of `SUITES`, writes its record at the end of a run in which nothing failed; without
`RECORD` nothing is written.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.measuring.measure import hardware, where_measured
from bench.measuring.processes import ROOT
from bench.measuring.results import FOLDER, git, write_whole

SUITE = "suite of tests"
"""The kind of such a record."""
PAGE = ROOT / "docs" / "tests.md"
MARK, END = "<!-- written by `make docs` from bench/results -->", "<!-- /suites -->"


@dataclass(frozen=True)
class Suite:
    """A target of the Makefile, and what it runs."""

    target: str
    what: str
    in_ci: bool = False


SUITES = {
    "test": Suite("test", "the tests to run while working", in_ci=True),
    "slow": Suite("test-slow", "the tests marked `slow`: more cases and steps, whole commands, some ranks", in_ci=True),
    "sweeps": Suite("test-sweeps", "every case of the long lists of which the slow tests have some"),
    "ranks": Suite("test-ranks", "all tests of several ranks"),
    "faults": Suite("test-faults", "kills, signals, memory limits, corrupt files, bad input"),
    "vllm": Suite("test-vllm", "GRPO with a real vLLM"),
    "others": Suite("test-others", "real trackers, and the parsers of Axolotl and LLaMA-Factory"),
    "wheel": Suite("test-wheel", "the wheel in an empty environment"),
    "gpu": Suite("test-gpu", "`tests/gpu`, on a CUDA GPU"),
}


VERSIONS = "versions"
"""The suite of `make test-versions`, of which there is a record for each pair of versions (`bench.docs.versions`)."""


def record(suite: str, passed: int, skipped: int, seconds: float) -> Path:
    """Writes that a suite passed here and now, over what is recorded of it.

    Args:
        suite: of `SUITES`, or `VERSIONS`.
        passed: the tests that ran.
        skipped: those that did not.
        seconds: of the whole run.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    commit = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "src", "tests")
    found = {
        "kind": SUITE,
        "suite": suite,
        "date": date.today().isoformat(),
        "commit": commit + " with changes" * bool(changed),
        "hardware": hardware(device) | {"threads": os.cpu_count() or 1},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
        "passed": passed,
        "skipped": skipped,
        "seconds": round(seconds),
    }
    versions = found["versions"]
    pair = (f"{name}-{'.'.join(versions[name].split('.')[:2])}" for name in ("torch", "transformers"))
    return write_whole(FOLDER / f"{VERSIONS}-{'-'.join(pair)}.json" if suite == VERSIONS else path_of(suite), found)


def path_of(suite: str) -> Path:
    """The file of a suite's record."""
    return FOLDER / f"tests-{suite}.json"


def read_records() -> dict[str, dict[str, Any]]:
    """The records that there are, by suite."""
    return {name: json.loads(path_of(name).read_text(encoding="utf-8")) for name in SUITES if path_of(name).exists()}


def table(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """The lines of the table: a suite each, recorded or not."""
    return [
        "| `make` | what | last passed | commit | on | passed | skipped | time |",
        "|---|---|---|---|---|---:|---:|---:|",
        *(f"| {' | '.join(_cells(suite, records.get(name)))} |" for name, suite in SUITES.items()),
    ]


def _cells(suite: Suite, found: dict[str, Any] | None) -> list[str]:
    first = [f"`{suite.target}`", suite.what + ", in `.ci/run`" * suite.in_ci]
    if found is None:
        return [*first, "not recorded", *[""] * 5]
    machine, (minutes, seconds) = found["hardware"], divmod(found["seconds"], 60)
    place = where_measured(machine) + ("" if "gpu" in machine else f", {machine['threads']} cores")
    counts = [f"{found[name]:,}" for name in ("passed", "skipped")]
    return [*first, found["date"], found["commit"], place, *counts, f"{minutes}:{seconds:02}"]
