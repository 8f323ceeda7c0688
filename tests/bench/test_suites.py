"""The page of when each suite last passed, and the records that it comes from."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from bench import suites
from bench.measuring.processes import ROOT
from tests.support.recording import SUITE, record_if_asked
from tests.support.short_tests import LIMIT, NAME, check_is_short, cpu_seconds, long_tests, not_counted


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(suites, "FOLDER", tmp_path)
    return tmp_path


def test_a_record_is_written_only_where_it_is_asked_for(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUITE, raising=False)
    record_if_asked(7, 1, 61.0)
    assert not [*records.iterdir()]
    monkeypatch.setenv(SUITE, "slow")
    record_if_asked(1234, 1, 61.4)
    found = suites.read_records()
    assert [*found] == ["slow"]
    assert (found["slow"]["passed"], found["slow"]["skipped"], found["slow"]["seconds"]) == (1234, 1, 61)


def test_the_table_has_each_suite_recorded_or_not(records: Path) -> None:
    suites.record("slow", 1234, 1, 61.4)
    found = suites.read_records()
    lines = dict(zip(suites.SUITES, suites.table(found)[2:], strict=True))
    assert "| 1,234 | 1 | 1:01 |" in lines["slow"]
    assert found["slow"]["date"] in lines["slow"]
    assert found["slow"]["commit"] in lines["slow"]
    assert all("not recorded" in line for name, line in lines.items() if name != "slow")


def test_the_page_is_that_of_the_records() -> None:
    _, rest = suites.PAGE.read_text(encoding="utf-8").split(suites.MARK)
    assert rest.split(suites.END)[0].strip().splitlines() == suites.table(suites.read_records()), "run `make docs`"


def test_each_suite_is_a_target_that_records_under_its_name() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, suite in suites.SUITES.items():
        assert re.search(rf"^{suite.target}:.*\n\t\$\(call recorded,{name},", makefile, re.MULTILINE), name


class Item:
    def __init__(self) -> None:
        self.user_properties: list[tuple[str, object]] = []
        self.nodeid = "test_x.py::test_y"


def test_a_test_above_the_limit_fails_and_one_near_it_is_listed() -> None:
    short, near, long = Item(), Item(), Item()
    check_is_short(short, 0.1)  # type: ignore[arg-type]
    check_is_short(near, LIMIT - 0.5)  # type: ignore[arg-type]
    with pytest.raises(pytest.fail.Exception, match=r"took 10\.5 s of CPU time"):
        check_is_short(long, LIMIT + 0.5)  # type: ignore[arg-type]
    assert near.user_properties == [(NAME, LIMIT - 0.5)]
    assert long_tests([short, near]) == ["  9.5 s  test_x.py::test_y"]


def test_what_a_machine_measures_once_counts_for_no_test() -> None:
    def busy() -> None:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass

    began = cpu_seconds()
    not_counted(busy)()
    assert cpu_seconds() - began < 0.1
