"""Tables in the docs that `make docs` writes."""

import pytest

from bench.devices import tables as devices
from bench.devices.cases import WEIGHTS
from bench.docs.__main__ import MEMORY_PAGE, TECHNIQUES_END, TECHNIQUES_MARK
from bench.docs.memory_docs import techniques_table
from bench.measuring.results import DEVICES, recorded


def test_the_table_of_memory_techniques_is_that_of_the_code():
    _, rest = MEMORY_PAGE.read_text(encoding="utf-8").split(TECHNIQUES_MARK)
    table, _ = rest.split(TECHNIQUES_END)
    assert table.strip().splitlines() == techniques_table(), "run `make docs`"


@pytest.mark.parametrize(("part", "lines"), [("tables", devices.tables), ("row", devices.row_section)])
def test_the_tables_of_many_devices_are_those_of_what_was_recorded(part, lines):
    (result,) = (each for each in recorded() if each.get("kind") == DEVICES)
    begins, ends = devices.MARKS[part]
    _, rest = devices.PAGE.read_text(encoding="utf-8").split(begins)
    assert rest.split(ends)[0].splitlines()[1:] == lines(result), "run `make docs`"


def test_the_long_row_is_predicted_below_what_trl_reports():
    (result,) = (each for each in recorded() if each.get("kind") == DEVICES)
    rows = [run for run in result["runs"] if "weights" in run]
    assert {run["weights"] for run in rows} == set(WEIGHTS)
    assert all(run["peak_bytes"] <= 56e9 and run["host_bytes"] > 0 and run["seconds"] > 0 for run in rows)


def test_a_model_that_fits_nowhere_says_the_least():
    run = {"case": "405B", "devices": 8, "refused": "nothing fits", "least_bytes": 90_000_000_000}
    assert devices.cells(run)[:2] == ["8", "nothing fits; at least 90 GB each"]
