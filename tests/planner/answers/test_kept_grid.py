"""One grid for the page of devices and for `lowtide gpus`: they agree on every cell, and traces say the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from lowtide.planner.answers.device_table import DeviceTable, Fit
from lowtide.planner.answers.kept_grid import grid
from lowtide.planner.answers.page import SCRIPT, file_text
from lowtide.planner.devices import DEVICES
from lowtide.planning import gpus

NAMES = [each["name"] for each in grid()["devices"]]
PARTS = 8
"""Into which the models are dealt, so that no test takes long."""
QUESTIONS = (("sft", 1024, 8), ("dpo", 1024, 8))
OTHERS = (("sft", 300, 3), ("sft", 8192, 4), ("dpo", 4096, 2), ("sft", 1024, 64))
"""Fewer tokens than were traced, longer rows, pairs, many rows."""


@pytest.fixture(autouse=True)
def gpus_of_the_grid(monkeypatch):
    """No other device is asked, and nothing may be traced."""

    def refuse(*asked: Any, **more: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr("lowtide.planning.DEVICES", {name: DEVICES[name] for name in NAMES})
    monkeypatch.setattr("lowtide.planner.answers.traces.point_of", refuse)


def by_page(asked: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """What the page's own script says of each question, by way."""
    script = file_text(SCRIPT)
    own = script[: script.index("function row(cells")]
    said = f"const document = {{getElementById: () => ({{textContent: {json.dumps(json.dumps(grid()))}}})}};"
    last = f"""console.log(JSON.stringify({json.dumps(asked)}.map(each => grid.devices.map(device =>
        grid.ways.map(way => fit(way, device, each))))));"""
    done = subprocess.run(["node", "-"], input=f"{said}\n{own}\n{last}", capture_output=True, text=True, check=True)
    ways = [way["name"] for way in grid()["ways"]]
    return [
        {name: dict(zip(ways, fits, strict=True)) for name, fits in zip(NAMES, each, strict=True)}
        for each in json.loads(done.stdout)
    ]


def question(model: str, method: str, length: int, rows: int) -> dict[str, Any]:
    found = grid()
    return {"method": method, "shape": found["models"][model], "positions": found["positions"][model],
            "length": length, "rows": rows}  # fmt: skip


def assert_same(table: DeviceTable, page: dict[str, dict[str, Any]]) -> int:
    cells = 0
    for row in table.rows:
        assert row.fits.keys() == page[row.device].keys()
        for way, fit in row.fits.items():
            said, where = page[row.device][way], (table.model, table.method, row.device, way)
            assert fit.fits == said["fits"], where
            assert fit.peak_bytes == pytest.approx(said["bytes"], abs=1), where
            assert fit.longest_row == said["longest"], where
            assert fit.tokens_per_second == (said["speed"] and pytest.approx(said["speed"], rel=1e-9)), where
            assert not fit.fits or written(fit) == said["settings"].strip(), where
            cells += 1
    return cells


def written(fit: Fit) -> str:
    return " ".join(
        f"--{name}" if value is True else f"--{name} {str(value).lower()}" for name, value in fit.settings.items()
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's script")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("method", "length", "rows"), QUESTIONS)
def test_page_and_command_agree_on_every_cell(method, length, rows, part):
    """The page by its script and the command by its own code, on all models, GPUs and ways."""
    agree(list(grid()["models"])[part::PARTS], method, length, rows)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's script")
@pytest.mark.parametrize(("method", "length", "rows"), OTHERS)
def test_they_agree_on_other_lengths_too(method, length, rows):
    agree(["Qwen/Qwen2.5-7B", "HuggingFaceTB/SmolLM2-360M", "openai/gpt-oss-20b"], method, length, rows)


def agree(models: list[str], method: str, length: int, rows: int) -> None:
    found = grid()
    there = [name for name in models if found["models"][name] in found["peaks"]]
    models = [name for name in there if found["positions"][name] >= length]
    pages = by_page([question(model, method, length, rows) for model in models])
    cells = 0
    for model, page in zip(models, pages, strict=True):
        cells += assert_same(gpus(method, model, lengths=f"{length}x{rows}"), page)
    assert cells == len(models) * len(NAMES) * 4


def test_a_cell_is_what_the_grid_has():
    """By hand: the fastest of the settings that fit whole."""
    found, model, name = grid(), "Qwen/Qwen2.5-0.5B", "RTX-4090"
    (row,) = gpus("sft", model, device=name, lengths="1024x8").rows
    number = NAMES.index(name)
    low, high = found["peaks"][found["models"][model]]["sft"]["LoRA plain"][0]
    first, second, *_, attention, once = found["seconds"][found["models"][model]]["sft"]["LoRA plain"][number]
    peak = (low + (high - low) * 7 / 63) * 2**20 + found["devices"][number]["context"]
    assert row.fits["LoRA"].peak_bytes == round(peak)
    assert row.fits["LoRA"].tokens_per_second == pytest.approx(8192 / (second + once) * 1000)
    assert attention > 0
    assert first < second


def test_what_the_grid_has_not_is_traced(monkeypatch):
    monkeypatch.setattr("lowtide.planner.parallel._cores", lambda: 1)
    asked: tuple[Any, ...] = ({"config": {"max_grad_norm": 0.0}}, {"lengths": "100+500+424x8"}, {"trace": True})
    for words in asked:
        with pytest.raises(AssertionError, match="traced"):
            gpus("dpo", "Qwen/Qwen2.5-0.5B", device="H100-80GB", **words)
