"""What each method of the table has: a page with its command and its paper, a short file, a link from other pages, and
a demo that its page names."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from lowtide.demo.lessons import LESSONS
from lowtide.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
MOST_LINES = 250
LONGER = {"grpo", "online-dpo", "ppo"}
"""Methods that were there before the limit."""
WITHOUT_DEMO = {
    *("orpo", "cpo", "bco", "sequence-classification", "rloo", "online-dpo", "ppo"),
}
"""Methods of which no lesson is known that a tiny model learns within two minutes, or none was tried."""


@pytest.mark.parametrize("name", METHODS)
def test_a_page_with_its_command_and_its_paper(name):
    page, paper = (DOCS / f"{name}.md").read_text(), METHODS[name].paper
    assert f"lowtide {name} " in page
    if paper is not None:
        assert (paper.arxiv or paper.elsewhere) in page


@pytest.mark.parametrize("name", [each for each in METHODS if each not in LONGER])
def test_its_own_file_is_short(name):
    module = import_module(METHODS.row(name).module or f"lowtide.methods.{name}")
    assert len(inspect.getsource(module).splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", METHODS)
def test_other_pages_lead_to_it(name):
    assert any(f"({name}.md" in page.read_text() for page in DOCS.glob("*.md") if page.stem != name)


@pytest.mark.parametrize("name", LESSONS)
def test_a_demo_that_its_page_names(name):
    command = "lowtide demo" if name == "sft" else f"lowtide demo --method {name}"
    assert f"`{command}`" in (DOCS / f"{name}.md").read_text()


def test_those_without_a_demo_are_known():
    assert METHODS.rows.keys() - LESSONS.keys() == WITHOUT_DEMO
