"""Which versions of torch and transformers were tested: the records of suites, and the table of docs/tests.md.

`make test-versions WITH="torch==2.13.* transformers==5.20.*"` runs the fast tests that depend on them most in an
environment of its own, and records that they passed. Only what a record says is called tested: `pyproject.toml` may
allow more, which the page names.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from bench import suites
from bench.measuring.processes import ROOT
from bench.measuring.results import FOLDER

MARK, END = "<!-- versions: written by `make docs` from bench/results -->", "<!-- /versions -->"
PACKAGES = ("torch", "transformers")
RECORDS = "versions-*.json"
"""Of `make test-versions`, a file a pair of versions."""


def minor(version: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(version.split(".")[:2])


def pair_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The versions of torch and transformers that a record is of."""
    return tuple(minor(found["versions"][name]) for name in PACKAGES)


def tested() -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """By versions, the newest first, the records of suites that passed."""
    found = [*suites.read_records().values()]
    found += [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob(RECORDS))]
    pairs: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for record in sorted(found, key=lambda each: tuple(map(_numbers, pair_of(each))), reverse=True):
        pairs.setdefault(pair_of(record), []).append(record)
    return pairs


def allowed(package: str) -> list[str]:
    """The minor versions of a package that `pyproject.toml` allows: those between its bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bounds,) = (re.fullmatch(rf"{package}>=(\d+)\.(\d+),<(\d+)\.(\d+)", each) for each in project["dependencies"]
                 if re.match(rf"{package}>=", each))  # fmt: skip
    assert bounds is not None
    assert bounds[1] == bounds[3], f"{package}: bounds of one major version"
    return [f"{bounds[1]}.{number}" for number in range(int(bounds[2]), int(bounds[4]))]


def table() -> list[str]:
    """The lines of the page: what was run with which versions, and which of those that are allowed were not run."""
    lines = ["| torch | transformers | passed | last |", "|---|---|---|---|"]
    for pair, records in tested().items():
        run = ", ".join(f"`make {_target(each)}` ({each['passed']:,} tests)" for each in records)
        lines.append(f"| {' | '.join(pair)} | {run} | {max(each['date'] for each in records)} |")
    for number, package in enumerate(PACKAGES):
        there = allowed(package)
        missing = [version for version in there if version not in {pair[number] for pair in tested()}]
        said = f"not run by a suite: {', '.join(missing)}" if missing else "all run by a suite"
        lines += ["", f"`pyproject.toml` allows {package} {there[0]} to {there[-1]}; {said}."]
    return lines


def _target(found: Mapping[str, Any]) -> str:
    suite = suites.SUITES.get(found["suite"])
    return "test-versions" if suite is None else suite.target


def _numbers(version: str) -> Iterable[int]:
    return tuple(int(each) for each in version.split("."))
