"""The page of devices: one file, whose numbers are those of the grid."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from lowtide.cli.main import main
from lowtide.planner.answers.known_models import known_models
from lowtide.planner.answers.page import grid, html_of
from lowtide.planner.devices import DEVICES


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
    assert len(text) < 200_000


def test_every_control_has_a_label():
    elements = Elements(html_of(grid())).found
    for number, (tag, _) in enumerate(elements):
        if tag in ("select", "input"):
            assert any(before == "label" for before, _ in elements[max(0, number - 2) : number]), elements[number]


def test_the_grid_has_the_models_and_devices_that_there_are():
    found = grid()
    assert found["models"].keys() == known_models().keys()
    assert {each["name"] for each in found["devices"]} <= DEVICES.keys()
    assert len(found["peaks"]) >= 10
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
