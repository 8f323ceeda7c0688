"""`lowtide sft` and `lowtide dpo` on rows whose images are files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli.main import main
from tests.support.models.vision_models import processor, rows, vision_model


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Flags of a model with its processor, and where to write."""
    vision_model("idefics3").save_pretrained(tmp_path / "base")
    processor("idefics3").save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {
        **{"model": tmp_path / "base", "max_length": "none", "per_device_train_batch_size": 4},
        **{"use_cpu": "true", "report_to": "none"},
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def by_path(folder: Path, count: int = 8) -> list[dict[str, Any]]:
    made = rows(count)
    for number, row in enumerate(made):
        paths = [str(folder / f"{number}-{place}.png") for place in range(len(row["images"]))]
        for path, image in zip(paths, row["images"], strict=True):
            image.save(path)
        row["images"] = paths
    return made


def written(folder: Path, made: list[dict[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(file)


@pytest.mark.slow
def test_sft_trains_on_files(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in by_path(tmp_path)]
    training = ["--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--freeze_vision_tower", "true"]
    assert main(["sft", *given, *training, "--dataset", written(tmp_path, made)]) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "processor_config.json").is_file()
    made[3]["images"][1] = str(tmp_path / "nowhere.png")
    assert main(["sft", *given, *training, "--dataset", written(tmp_path, made)]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "rows.jsonl, row 3" in said
    assert "nowhere.png" in said


@pytest.mark.slow
def test_dpo_is_estimated(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "dpo", *given, "--dataset", written(tmp_path, by_path(tmp_path))]) == 0
    assert "reference" in capsys.readouterr().out
