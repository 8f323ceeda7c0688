"""A method that is one file and one row of the table trains, is estimated and planned, and has its command."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lowtide
from lowtide.cli.main import main
from lowtide.methods import METHODS, MethodRow
from tests.support.runs import small_sft
from tests.support.runs.saved_llama import COMMON, DESCRIBED, saved_model
from tests.support.runs.toy_method import FloorOptions


@pytest.fixture(autouse=True)
def _row(monkeypatch):
    """The one row."""
    row = MethodRow("Floor", "likelihood above a floor", "tests.support.runs.toy_method")
    monkeypatch.setitem(METHODS.rows, "floor", row)


def config(folder: Path, **options: Any) -> Any:
    return lowtide.FloorConfig(output_dir=str(folder), **{**COMMON, **options})  # type: ignore[attr-defined]


def test_its_config_has_its_options_and_everybodys(tmp_path):
    made = config(tmp_path, floor=0.5)
    assert isinstance(made, FloorOptions)
    assert (made.floor, made.learning_rate, made.padding_free) == (0.5, 3e-4, True)
    assert pickle.loads(pickle.dumps(made)).floor == 0.5
    with pytest.raises(ValueError, match=r"floor=-1.* must be"):
        config(tmp_path, floor=-1)
    with pytest.raises(TypeError, match="floor"):
        lowtide.SFTConfig(output_dir=str(tmp_path), floor=0.5)  # type: ignore[call-arg]


def test_it_trains_with_the_plain_loss(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DESCRIBED)
    rows = small_sft.rows(4)
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor(row["input_ids"])  # type: ignore[index]
        logprobs = model(ids[None]).logits[0].detach().log_softmax(-1)
        taken = -logprobs[:-1].gather(1, ids[1:, None]).flatten()
        total += float(torch.relu(taken - 3.6).sum())
        count += len(taken)
    made = config(tmp_path, floor=3.6, dataset_kwargs={"skip_prepare_dataset": True})
    trainer = lowtide.FloorTrainer(model, made, train_dataset=rows)  # type: ignore[attr-defined]
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_it_is_estimated_and_planned(tmp_path):
    made = config(tmp_path, max_length=64)
    assert lowtide.estimate(made, DESCRIBED, lengths=[24] * 8).peak_bytes > 0


def test_it_has_its_command(tmp_path, capsys):
    assert main(["floor", "--help"]) == 0
    assert "--floor" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "likelihood above a floor" in capsys.readouterr().out
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} + {n} = {2 * n}"}) + "\n" for n in range(8)))
    folder = saved_model(tmp_path / "model")
    words = ["floor", "--model", str(folder), "--dataset", str(data), "--floor", "0.2", "--output_dir"]
    options = [f"--{name}={value}" for name, value in COMMON.items()]
    assert main([*words, str(tmp_path / "run"), *options]) == 0
    assert "floor: 0.2" in (tmp_path / "run" / "run.yaml").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.hidden_size == 16
