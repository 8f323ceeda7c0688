"""Who imports whom among tests and benchmarks: helpers have a place of their own, and neither knows the other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """Every import in a folder: the file, relative to the checkout, and the dotted name of what it imports."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((file, each.name) for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((file, ".".join(filter(None, (node.module, each.name)))) for each in node.names)


def test_no_module_imports_a_test_module():
    modules = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    found = [
        (file, name) for part in ("tests", "bench") for file, name in imports(part) if modules & {*name.split(".")}
    ]
    assert not found, "what tests share belongs in tests/support/"


def test_benchmarks_import_no_tests():
    assert not [(file, name) for file, name in imports("bench") if name.split(".")[0] in ("tests", "conftest")]


def test_only_the_tests_of_benchmarks_import_benchmarks():
    found = [(file, name) for file, name in imports("tests") if name.split(".")[0] == "bench"]
    recorder = "tests/support/recording.py"  # a run of tests that is recorded is among the results
    assert not [file for file, _ in found if not file.startswith("tests/bench/") and file != recorder]
    assert found, "no import was read"
