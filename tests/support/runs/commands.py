"""Training commands that are called from flags and from run files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lowtide.cli.main import main
from lowtide.demo.run import Sizes, run_demo

SMALL: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
"""Options of each run here."""


def flags_of(given: dict[str, Any]) -> list[str]:
    """The options as a command line has them."""
    shown = {name: str(value).lower() if value is True else str(value) for name, value in given.items()}
    return [part for name, value in shown.items() for part in (f"--{name}", value)]


def check_flags_and_file(command: str, given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The same options train the same weights as flags, into `output_dir`, and in a run file."""
    folder = Path(given["output_dir"])
    again, file = folder.with_name("again"), folder.with_name("run.yaml")
    assert main([command, *flags_of(given)]) == 0, capsys.readouterr().err
    file.write_text(yaml.safe_dump(given | {"output_dir": str(again)}))
    assert main([command, "--config", str(file)]) == 0, capsys.readouterr().err
    first, second = (load_file(each / "model.safetensors") for each in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def check_demo(method: str, shown: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo of a method trains, measures what it wrote, and shows it."""

    def command(method: str, file: Path) -> int:
        return main([method, "--traceback", "--config", str(file), "--disable_tqdm", "true"])

    report = run_demo(folder, command, method=method, sizes=Sizes(steps=4, questions=256, held_out=20, samples=3))
    assert report is not None
    assert 0 <= report["exact_match_after"] <= 1
    assert shown in capsys.readouterr().out
