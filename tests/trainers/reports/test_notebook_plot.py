"""In a notebook the curves of a run are shown once, and drawn anew with each log."""

from __future__ import annotations

import html
import re
import sys
from types import SimpleNamespace

import pytest

from lowtide.trainers.reports import notebook_plot
from lowtide.trainers.reports.run_page import curves
from tests.support.runs.small_runs import trained


class Display:
    """IPython's, as far as a plot asks it: what is shown, by its place in the notebook."""

    def __init__(self) -> None:
        self.places: list[list[str]] = []

    def __call__(self, shown: str, display_id: bool) -> SimpleNamespace:
        assert display_id
        place = [shown]
        self.places.append(place)
        return SimpleNamespace(update=place.append)


@pytest.fixture
def display(monkeypatch) -> Display:
    made = Display()
    module = SimpleNamespace(HTML=str, display=made)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return made


def test_a_run_in_a_notebook_has_one_plot_that_grows(display, monkeypatch, tmp_path):
    monkeypatch.setattr(notebook_plot, "is_in_notebook", lambda: True)
    options = {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": False}
    trainer = trained(tmp_path / "run", **options)
    (place,) = display.places
    drawn = [re.findall(r"points=\"([^\"]*)\"", html.unescape(each)) for each in place]
    assert [len(points[0].split()) for points in drawn] == [1, 2, 3, 3]
    assert curves(trainer.state.log_history) in html.unescape(place[-1])


def test_elsewhere_there_is_none(display, tmp_path):
    trained(tmp_path / "run", max_steps=1, logging_steps=1, save_strategy="no", disable_tqdm=False)
    assert display.places == []


def test_a_log_without_a_curve_shows_nothing(display):
    state = SimpleNamespace(is_world_process_zero=True, log_history=[{"train_runtime": 3.0, "step": 1}])
    notebook_plot.NotebookPlot().on_log(None, state, None)
    assert display.places == []
