"""The notebooks run as they stand, and hold what their cells gave."""

import json

import pytest

from docs_site.run_notebooks import FOLDER, run_cell, run_cells
from tests.support.marks import slow_but

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
stem = lambda path: path.stem  # noqa: E731


def test_a_cell_gives_what_it_prints_and_its_last_expression():
    names: dict = {}
    printed, shown = run_cell("x = 2\nprint('a')\nx + 1", names, "here")
    assert printed["text"] == ["a\n"]
    assert shown["data"] == {"text/plain": ["3"]}
    assert names["x"] == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_and_is_small(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    assert sum("image/svg+xml" in output.get("data", {}) for cell in codes for output in cell["outputs"]) == 1
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize(
    "path", slow_but((), NOTEBOOKS, swept=[each for each in NOTEBOOKS if each.stem != "first-fine-tuning"]), ids=stem
)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_cells(json.loads(path.read_text(encoding="utf-8")), path.stem)
    losses = [entry["loss"] for entry in names["entries"]]
    assert losses[-1] < losses[0] * 2 / 3
