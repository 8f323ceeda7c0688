"""Which fast tests run which lines: each file of tests is run once under coverage, and again only when it changes."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .changes import PACKAGES, Change
from .warm import Recorder, run_tests

LEFT_OUT = ("gpu", "with_vllm", "with_others", "packaging", "faults", "docs_site", "support", "ranks")
"""Folders of tests that want another machine or environment, or are no tests."""
MOST_SECONDS = 150
"""Of CPU time, of the tests of one file under coverage."""


def files_of_tests(root: Path) -> list[str]:
    """All files that may hold fast tests; first of what is changed, then of what is built on it."""
    found = [str(each.relative_to(root)) for each in (root / "tests").rglob("test_*.py")]
    order = (*PACKAGES, "engine", "data", "rollout", "memory", "trainers", "run", "parity")
    places = {f"tests/{package}/": number for number, package in enumerate(order)}
    wanted = [each for each in found if each.split("/")[1] not in LEFT_OUT]
    return sorted(
        wanted, key=lambda each: (min((n for p, n in places.items() if each.startswith(p)), default=99), each)
    )


def traced(tree: Path, file: str) -> dict[str, Any]:
    """Runs the tests of a file in this process: how each came out, its seconds, and the lines that it ran."""
    import coverage

    sources = [str(tree / "src/lowtide" / package) for package in PACKAGES]
    tracing = coverage.Coverage(data_file=None, source=sources, config_file=False)
    recorder = Recorder(begins=tracing.switch_context)
    tracing.start()
    status = run_tests([file], recorder, first_failure=False)
    tracing.stop()
    data, lines = tracing.get_data(), {}
    for path in data.measured_files():
        for line, tests in data.contexts_by_lineno(path).items():
            for test in tests:
                lines.setdefault(test, {}).setdefault(str(Path(path).relative_to(tree)), []).append(line)
    return {
        "status": status,
        "tests": {
            test: {"outcome": outcome, "seconds": recorder.seconds[test], "lines": lines.get(test, {})}
            for test, outcome in recorder.outcomes.items()
        },
    }


@dataclass
class Covering:
    """What is known of the tests, in a folder of JSON files."""

    root: Path
    folder: Path

    def missing(self) -> list[str]:
        """Files of tests that have not been run as they are now."""
        return [each for each in files_of_tests(self.root) if not self._path(each).exists()]

    def note(self, file: str, found: dict[str, Any]) -> None:
        sources = {path for test in found.get("tests", {}).values() for path in test["lines"]}
        found["sources"] = {path: (self.root / path).read_text() for path in sources}
        self.folder.mkdir(parents=True, exist_ok=True)
        for earlier in self.folder.glob(f"{self._name(file)}.*"):
            earlier.unlink()
        self._path(file).write_text(json.dumps({"file": file, **found}))

    def read(self) -> Covered:
        """All that is known, with the lines of the source as it is now."""
        lines: dict[tuple[str, int], set[str]] = {}
        seconds: dict[str, float] = {}
        there = {self._path(each) for each in files_of_tests(self.root)}
        for path in sorted(self.folder.glob("*.json")):
            if path not in there:
                continue
            known = json.loads(path.read_text())
            moved = {source: dict(_moved(text, self.root / source)) for source, text in known["sources"].items()}
            for test, found in known.get("tests", {}).items():
                if found["outcome"] != "passed":
                    continue
                seconds[test] = found["seconds"]
                for source, numbers in found["lines"].items():
                    for number in numbers:
                        lines.setdefault((source, moved[source].get(number, 0)), set()).add(test)
        return Covered(lines, seconds, _importers(self.root, {source for source, _ in lines}))

    def _name(self, file: str) -> str:
        return file.replace("/", "__")

    def _path(self, file: str) -> Path:
        digest = hashlib.sha256((self.root / file).read_bytes()).hexdigest()[:12]
        return self.folder / f"{self._name(file)}.{digest}.json"


def _moved(before: str, path: Path) -> Iterator[tuple[int, int]]:
    """From the numbers of lines in an earlier text to those in a file as it is now."""
    now = path.read_text() if path.exists() else ""
    old, new = before.splitlines(), now.splitlines()
    if old == new:
        yield from ((number, number) for number in range(1, len(old) + 1))
        return
    for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        yield from ((block.a + place + 1, block.b + place + 1) for place in range(block.size))


def _importers(root: Path, sources: set[str]) -> dict[str, set[str]]:
    """By source, those that import it."""
    found: dict[str, set[str]] = {}
    for source in sources:
        text = (root / source).read_text() if (root / source).exists() else ""
        for module, names in re.findall(r"^ *from (lowtide[\w.]*) import \(?([^)\n]*)", text, re.MULTILINE):
            for each in (module, *(f"{module}.{name.strip()}" for name in names.split(","))):
                found.setdefault(f"src/{each.replace('.', '/')}.py", set()).add(source)
    return found


@dataclass
class Covered:
    """Tests by what they run."""

    lines: dict[tuple[str, int], set[str]]
    seconds: dict[str, float]
    importers: dict[str, set[str]] = field(default_factory=dict)
    """By source, those that import it."""

    def of(self, change: Change) -> list[str]:
        """The tests that run a change: first those of its file, then those of its package, and of each the quickest.

        A line outside of functions runs when its module is imported: all tests count that run anything of the module,
        or of one that imports it. Of a line that no test runs in its own process, they are the tests of its file, which
        may start others.
        """
        if change.in_function:
            ran = [self.lines.get((change.path, line), set()) for line in range(change.first, change.last + 1)]
        else:
            readers = {change.path, *self.importers.get(change.path, ())}
            ran = [tests for (path, _), tests in self.lines.items() if path in readers]
        found = set().union(*ran)
        found = found or {test for test in self.seconds if _distance(test, change.path) == 0}
        return sorted(found, key=lambda test: (_distance(test, change.path), self.seconds[test], test))


def _distance(test: str, source: str) -> int:
    """How far the file of a test lies from a file of the source."""
    file, path = Path(test.split("::")[0]), Path(source)
    if file.stem == f"test_{path.stem}":
        return 0
    return 1 if file.parts[1:2] == path.parts[2:3] else 2
