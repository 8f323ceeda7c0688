"""`lowtide gkd` and `lowtide distillation`: flags and a run file, an estimate, and one message for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.cli.main import main
from tests.support.references.parity_world import build_model, tokenizer
from tests.support.runs.commands import SMALL, check_flags_and_file, flags_of
from tests.support.runs.distilling import build_teacher, talks


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Student and teacher in folders, a file of conversations, and where to write."""
    data = tmp_path / "rows.jsonl"
    for name, model in (("student", build_model("llama")), ("teacher", build_teacher(torch.float32))):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    data.write_text("".join(json.dumps(row) + "\n" for row in talks(12)))
    return {
        **{"model": str(tmp_path / "student"), "teacher_model_name_or_path": str(tmp_path / "teacher")},
        **{"dataset": str(data), "output_dir": str(tmp_path / "run"), "max_steps": 2, "max_new_tokens": 6},
        **{"per_device_train_batch_size": 2, "lmbda": 0.5, "seq_kd": True},
        **SMALL,
    }


def test_flags_and_run_files_train_alike(given, tmp_path, capsys):
    check_flags_and_file("gkd", given, capsys)
    assert "completions/mean_length" in capsys.readouterr().out


@pytest.fixture
def on_policy(given: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same for a student that writes after prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": talk[:1]}) + "\n" for talk in talks(12)["messages"]))
    ours = {name: value for name, value in given.items() if name not in ("lmbda", "seq_kd", "max_new_tokens")}
    return ours | {"dataset": str(prompts), "max_completion_length": 6}


@pytest.mark.slow
def test_on_policy_from_flags_and_run_files_alike(on_policy, capsys):
    check_flags_and_file("distillation", on_policy, capsys)
    assert "completions/mean_length" in capsys.readouterr().out


def test_rewards_are_no_option_of_distillation(on_policy, capsys):
    assert main(["distillation", *flags_of(on_policy), "--reward_funcs", "length"]) == 2
    assert "reward_funcs" in capsys.readouterr().err


def test_a_missing_teacher_is_one_message(given, capsys):
    del given["teacher_model_name_or_path"]
    assert main(["gkd", *flags_of(given)]) == 2
    assert "there is no teacher" in capsys.readouterr().err


@pytest.mark.slow
def test_the_estimate_counts_the_teacher(given, capsys):
    own = {name: given[name] for name in ("model", "dataset", "per_device_train_batch_size", "max_new_tokens")}
    own["teacher_model_name_or_path"] = given["teacher_model_name_or_path"]
    assert main(["estimate", "gkd", *flags_of(own), "--device", "H100-80GB", "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)["phases"]
    teacher = build_teacher(torch.float32)
    size = sum(each.numel() * each.element_size() for each in (*teacher.parameters(), *teacher.buffers()))
    assert {held["reference"] for held in phases.values()} == {size}
    assert "generate" in phases
