"""The page of devices: one file, whose numbers are those of the grid."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from lowtide.cli.main import main
from lowtide.methods import METHODS
from lowtide.planner.answers.kept_grid import grid
from lowtide.planner.answers.known_models import known_models
from lowtide.planner.answers.page import SCRIPT, file_text, html_of
from lowtide.planner.devices import DEVICES
from lowtide.run.options.configs import config_class
from lowtide.run.options.training import default_of
from tests.support.pages.browser import CHROMIUM, browser

NOTHING = {"contrast": [], "wider": [], "unnamed": [], "cut": [], "unsaid": []}
"""What an audit finds of a page with which nothing is wrong."""


class Elements(HTMLParser):
    """Tags with their attributes, and the grid."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.embedded = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found[-1:] and self.found[-1][1].get("id") == "grid":
            self.embedded += data


def test_it_asks_nothing_of_the_network(tmp_path, capsys):
    file = tmp_path / "folder" / "page.html"
    assert main(["page", "--output", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    elements = Elements(text)
    assert not [each for _, each in elements.found if {"src", "href", "action"} & each.keys()]
    assert "url(" not in text
    assert "fetch(" not in text
    assert json.loads(elements.embedded) == grid()
    assert len(text) < 600_000


def test_sizes_are_in_gib_as_commands_have_them():
    text = html_of(grid())
    assert '" GiB"' in text
    assert '" GB"' not in text


def test_every_control_has_a_label():
    elements = Elements(html_of(grid())).found
    for number, (tag, _) in enumerate(elements):
        if tag in ("select", "input"):
            assert any(before == "label" for before, _ in elements[max(0, number - 2) : number]), elements[number]


def test_the_grid_has_the_models_and_devices_that_there_are():
    found = grid()
    assert found["models"].keys() == known_models().keys()
    there = [each for each in DEVICES.values() if each.kind == "cuda" and each.capability >= (8, 0)]
    assert {each["name"] for each in found["devices"]} == {each.name for each in there}
    assert [each["number"] for each in found["devices"]] == [*range(len(there))]
    assert len(found["peaks"]) == len(set(found["models"].values()))
    for name, shape in found["models"].items():
        if shape not in found["peaks"]:
            continue
        assert found["peaks"][shape].keys() >= set(found["methods"]) >= {"sft"}, name
        for method, stages in found["peaks"][shape].items():
            for stage, peaks in stages.items():
                for line in peaks:
                    assert len(line) == len(found["tokens"][method]), (name, stage)
                    assert line[0] <= line[1], (name, method, stage)


def test_names_cannot_end_the_script():
    made = {**grid(), "date": "</script><b>"}
    assert "</script><b>" not in html_of(made)


def test_its_commands_name_rows_and_a_length_that_cuts_none():
    script = file_text(SCRIPT)
    assert "--dataset DATA" in script
    most = int(re.search(r"MOST = ([0-9]+)", script)[1])
    for method in grid()["methods"]:
        assert default_of(config_class(METHODS[method]), "max_length") == most


@pytest.fixture(scope="module")
def tab():
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html_of(grid()), encoding="utf-8")
    return path.as_uri()


in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="needs chromium, which this machine does not have")


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_in_a_browser_it_is_readable_and_asks_for_nothing(tab, written, width, dark):
    tab.open(written, width=width, dark=dark)
    assert tab.audit() == NOTHING
    assert tab.errors == []
    assert tab.requests == [written]
    assert tab.run("document.querySelectorAll('#devices tr').length") == 1 + len(grid()["devices"])


@in_a_browser
def test_in_a_browser_it_is_operated_by_keys(tab, written):
    tab.open(written, width=800)
    focused, state = [], "({length: at('length').value, said: at('length_said').textContent, rows: at('rows').value})"
    for _ in range(5):
        tab.press("Tab", 9)
        focused.append(tab.run("document.activeElement.id"))
        assert tab.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert focused == ["model", "method", "device", "length", "rows"]
    before = tab.run(state)
    tab.press("ArrowRight", 39)
    tab.press("Tab", 9, shift=True)
    tab.press("ArrowRight", 39)
    tab.press("ArrowRight", 39)
    assert tab.run(state) == {"length": "11", "said": "2,048", "rows": str(int(before["rows"]) + 1)}
    tab.press("End", 35)
    positions = grid()["positions"]["Qwen/Qwen2.5-7B"]
    assert tab.run("at('length').getAttribute('aria-valuetext')") == f"{positions:,} tokens"


@in_a_browser
def test_in_a_browser_a_command_has_the_lengths_that_were_chosen(tab, written):
    tab.open(written, width=800)

    def command(length: int) -> str:
        chosen = f"at('device').value = 'H100-80GB'; at('length').value = {length}; update();"
        return tab.run(f"{chosen} document.querySelector('#ways code').textContent")

    assert "--dataset DATA --per_device_train_batch_size 8 " in command(10)
    assert "--max_length" not in command(10)
    assert "--max_length 2048 " in command(11)


@in_a_browser
def test_in_a_browser_an_address_has_the_choices(tab, written):
    chosen = "#model=Qwen%2FQwen2.5-0.5B&method=dpo&device=H100-80GB&length=4096&rows=3"
    tab.open("about:blank", width=800)  # another address of the page it shows would not be loaded anew
    tab.open(written + chosen, width=800)
    state = "['model', 'method', 'device', 'rows'].map(id => at(id).value)"
    assert tab.run(state) == ["Qwen/Qwen2.5-0.5B", "dpo", "H100-80GB", "3"]
    assert tab.run("at('length_said').textContent") == "4,096"
    tab.run("at('rows').value = 5; at('rows').dispatchEvent(new Event('input'))")
    assert tab.run("location.hash") == chosen.replace("rows=3", "rows=5")
    tab.open("about:blank", width=800)
    tab.open(written + "#model=none&length=3&rows=x&other=1", width=800)  # what is no choice is left as it was
    assert tab.run(state) == ["Qwen/Qwen2.5-7B", "sft", "RTX-4090", "8"]
    assert tab.errors == []


@in_a_browser
def test_in_a_browser_commands_and_the_address_are_copied(tab, written):
    tab.open(written, width=800)
    tab.run("window.copied = []; navigator.clipboard.writeText = async text => { copied.push(text) }")
    names = "[...document.querySelectorAll('button')].map(each => each.getAttribute('aria-label'))"
    assert tab.run(names)[0] == "Copy link to this answer"
    assert "Copy the command of LoRA" in tab.run(names)
    tab.run("for (const each of document.querySelectorAll('button')) each.click()")
    link, *commands = tab.run("copied")
    assert link.startswith(written + "#model=Qwen%2FQwen2.5-7B&method=sft&device=RTX-4090&length=1024&rows=8")
    assert commands == tab.run("[...document.querySelectorAll('#ways code')].map(each => each.textContent.trim())")
    assert commands


@pytest.mark.slow
@in_a_browser
def test_in_a_browser_what_does_not_fit_says_so(tab, written):
    tab.open(written, width=800)

    def best(model: str, device: str) -> str:
        chosen = f"at('model').value = '{model}'; at('device').value = '{device}'; update();"
        return tab.run(f"{chosen} at('best').textContent")

    smallest = min(grid()["devices"], key=lambda each: each["memory"])["name"]
    assert best("Qwen/Qwen2.5-0.5B", "H100-80GB") == "full fits"
    assert best("Qwen/Qwen2.5-7B", smallest) != "full fits"
    found = tab.run("[...document.querySelectorAll('.no h3 span')].map(each => each.textContent)")
    said = re.compile(r"does not fit: [0-9.]+ GiB of [0-9.]+ GiB, of which 5% are left free")
    assert found
    assert all(map(said.fullmatch, found))
