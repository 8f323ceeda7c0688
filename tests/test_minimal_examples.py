"""The flat loops of methods learn, and the script for GSM8K trains."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from lowtide.demo.model import make_model, make_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_minimal_dpo_learns_which_answers_are_preferred():
    names = runpy.run_path(str(EXAMPLES / "minimal_dpo.py"), run_name="__main__")
    pairs, batch = names["pairs"], names["batch"]
    assert batch.tokens < batch.repeated_tokens
    assert (pairs.chosen_ratio > pairs.rejected_ratio).float().mean() > 0.7
    assert names["loss"].item() < 0.65


@pytest.mark.slow
def test_a_loop_of_ones_own_around_the_runner_learns(capsys):
    names = runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    assert names["answer"].tolist()[:6] == [5, 1, 4, 1, 3, names["STOP"]]
    assert names["loss"].item() < 0.1
    assert not names["runner"].begun


@pytest.mark.slow
def test_minimal_grpo_learns_what_is_rewarded():
    names = runpy.run_path(str(EXAMPLES / "minimal_grpo.py"), run_name="__main__")
    assert names["rewards"].mean() > 0.7
    assert not names["runner"].begun


def test_grpo_on_gsm8k_trains_on_a_file_of_its_rows(tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    for part in (make_model(tokenizer, seed=0), tokenizer):
        part.save_pretrained(tmp_path / "model")
    rows = [{"question": f"What is {n} + 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["--model", str(tmp_path / "model"), "--output_dir", str(tmp_path / "run"), "--max_steps", "1"]
    words += ["--max_completion_length", "8", "--per_device_train_batch_size", "8"]
    monkeypatch.setattr(sys, "argv", ["grpo_gsm8k.py", str(tmp_path / "rows.jsonl"), *words])
    trainer = runpy.run_path(str(EXAMPLES / "grpo_gsm8k.py"), run_name="__main__")["trainer"]
    assert trainer.state.global_step == 1
    assert trainer.rewards.names == ["exact_answer"]
    assert (tmp_path / "run" / "model.safetensors").exists()
