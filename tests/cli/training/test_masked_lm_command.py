"""`lowtide masked-lm` from flags and from a run file, its estimate, and its demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import pipeline

from lowtide import MaskedLMConfig, estimate
from lowtide.cli.main import main
from tests.support.models.masked_texts import build, texts, tokenizer
from tests.support.runs.commands import SMALL, check_demo, check_flags_and_file


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A model's folder, a file of texts, and where to write."""
    model, data = tmp_path / "base", tmp_path / "rows.jsonl"
    build("modernbert").save_pretrained(model)
    tokenizer().save_pretrained(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in texts(24)))
    return {
        **{"model": str(model), "dataset": str(data), "output_dir": str(tmp_path / "run"), "max_steps": 3},
        **{"per_device_train_batch_size": 4, "whole_word_mask": True, "masking": "spans"},
        **SMALL,
    }


@pytest.mark.slow
def test_flags_and_run_files_train_alike(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    check_flags_and_file("masked-lm", given, capsys)
    saved = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert (saved["masking"], saved["whole_word_mask"]) == ("spans", True)
    assert pipeline("fill-mask", model=str(tmp_path / "run"))("tides [MASK] gulls")[0]["score"] > 0


def test_a_missing_mask_token_is_one_message(given: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    tokenizer(None).save_pretrained(given["model"])
    file = Path(given["output_dir"]).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(given))
    assert main(["masked-lm", "--config", str(file)]) == 2
    assert "has no mask token" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("by", ["lengths", "rows"])
def test_the_peak_is_predicted(by: str, tmp_path: Path):
    """By the scores that masks leave: with all tokens masked, the head takes more."""
    rows = {"lengths": [40] * 24} if by == "lengths" else {"dataset": texts(24), "processing_class": tokenizer()}
    model = build("bert", vocab_size=3000).config
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 8, "use_cpu": True, "bf16": False}
    few, many = (estimate(MaskedLMConfig(mlm_probability=share, **options), model, **rows) for share in (0.05, 1.0))
    assert {"forward", "backward", "optimizer"} <= few.phases.keys()
    assert sum(few.phases["head"].values()) < sum(many.phases["head"].values())


@pytest.mark.slow
def test_the_demo_trains_an_encoder_and_fills_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    check_demo("masked-lm", "rightly filled in", tmp_path, capsys)
