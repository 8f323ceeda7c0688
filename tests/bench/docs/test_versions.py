"""Only what a suite was run with is called tested, and CI is one of those."""

import json
import re

from bench import suites
from bench.docs import versions
from tests.support.packaging import ROOT

RECORD = {"suite": "test", "date": "2026-11-30", "passed": 1234}


def test_the_versions_that_are_pinned_are_those_that_ci_runs_and_the_last_allowed_was_run():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in text if "==" in line)
    of_ci = [
        each["suite"] for each in versions.tested()[tuple(versions.minor(pinned[name]) for name in versions.PACKAGES)]
    ]
    assert {name for name, suite in suites.SUITES.items() if suite.in_ci} <= {*of_ci}
    for number, package in enumerate(versions.PACKAGES):
        ran = {pair[number] for pair in versions.tested()}
        assert versions.allowed(package)[-1] in ran, f"{package}: a suite runs the last version that is allowed"


def test_the_page_says_what_was_run_and_what_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(suites, "FOLDER", tmp_path)
    for suite, torch, transformers in (("test", "2.13.0+cpu", "5.9.1"), ("versions", "2.11.0", "5.23.0")):
        found = RECORD | {"suite": suite, "versions": {"torch": torch, "transformers": transformers}}
        name = "tests-test.json" if suite == "test" else "versions-a.json"
        (tmp_path / name).write_text(json.dumps(found))
    monkeypatch.setattr(
        versions, "allowed", lambda package: ["2.11", "2.13"] if package == "torch" else ["5.9", "5.22"]
    )
    assert versions.table()[2:] == [
        "| 2.13 | 5.9 | `make test` (1,234 tests) | 2026-11-30 |",
        "| 2.11 | 5.23 | `make test-versions` (1,234 tests) | 2026-11-30 |",
        "",
        "`pyproject.toml` allows torch 2.11 to 2.13; all run by a suite.",
        "",
        "`pyproject.toml` allows transformers 5.9 to 5.22; not run by a suite: 5.22.",
    ]


def test_the_page_calls_no_other_versions_tested_than_the_records():
    text = suites.PAGE.read_text(encoding="utf-8").split(versions.MARK)[1].split(versions.END)[0]
    rows = re.findall(r"^\| (\d[\d.]+) \| (\d[\d.]+) \| ", text, re.MULTILINE)
    assert {*rows} == {*versions.tested()}, "run `make docs`"


def test_each_pair_of_versions_has_a_record_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "FOLDER", tmp_path)
    path = suites.record(suites.VERSIONS, 5, 0, 1.0)
    assert path.match(versions.RECORDS)
    assert "torch-2." in path.name
    assert suites.read_records() == {}
