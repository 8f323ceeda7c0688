"""The Python of the trainers' pages runs as it stands there, and logs what the page says that it logs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TRAINERS = ("dpo", "kto", "reward", "orpo", "cpo", "bco")
UNNAMED = {"step", "epoch"}
"""Of every log entry of a `transformers.Trainer`."""


def python_blocks(page: str) -> list[str]:
    """The fenced Python of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def logged_names(page: str) -> set[str]:
    """The names in the first column of the table under "Logged"."""
    (section,) = re.findall(
        r"^## Logged\n(.*?)^## ", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name for first in firsts for name in re.findall(r"`([^`]+)`", first)}


def run(page: str) -> dict:
    names: dict = {}
    blocks = python_blocks(page)
    assert blocks, f"{page} has no example"
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """What an example writes goes to a folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("method", TRAINERS)
def test_a_trainers_example_trains_and_logs_what_its_page_lists(method):
    trainer = run(f"{method}.md")["trainer"]
    assert trainer.state.global_step == trainer.args.max_steps
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == trainer.args.max_steps
    assert set().union(*entries) - UNNAMED == logged_names(f"{method}.md")


def test_the_arithmetic_of_prefix_sharing():
    run("prefix-sharing.md")


def test_every_trainers_page_is_listed_and_every_link_leads_somewhere():
    listed = (DOCS / "index.md").read_text(encoding="utf-8")
    for method in TRAINERS:
        assert f"({method}.md)" in listed
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page.name}: {target}"
