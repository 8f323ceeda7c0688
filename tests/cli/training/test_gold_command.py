"""`lowtide gold`: flags and a run file, an estimate, and one message where the teacher has other tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli.main import main
from tests.support.runs.commands import SMALL, check_flags_and_file, flags_of
from tests.support.runs.two_tokenizers import model, rows, tokenizers


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Student and teacher in folders, of other tokens, a file of rows, and where to write."""
    student, teacher = tokenizers()
    for name, made, own in (
        ("student", model("llama", len(student), 0), student),
        ("teacher", model("qwen2", len(teacher), 1, hidden_size=96), teacher),
    ):
        made.float().save_pretrained(tmp_path / name)
        own.save_pretrained(tmp_path / name)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(12)))
    return {
        **{"model": str(tmp_path / "student"), "teacher_model_name_or_path": str(tmp_path / "teacher")},
        **{"dataset": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "run"), "max_steps": 2},
        **{"per_device_train_batch_size": 2, "use_uld_loss": True, "max_completion_length": 6},
        **SMALL,
    }


@pytest.mark.slow
def test_flags_and_run_files_train_alike(given, capsys):
    check_flags_and_file("gold", given, capsys)


def test_without_it_the_message_names_it(given, capsys):
    assert main(["gold", *flags_of(given | {"use_uld_loss": False})]) == 2
    assert "GOLD" in capsys.readouterr().err


@pytest.mark.slow
def test_the_estimate_counts_the_teacher_and_its_states(given, capsys):
    names = ("model", "dataset", "per_device_train_batch_size", "teacher_model_name_or_path", "use_uld_loss")
    own = {name: given[name] for name in names}
    found = {}
    for most in (6, 600):
        flags = flags_of(own | {"max_completion_length": most})
        assert main(["estimate", "gold", *flags, "--device", "H100-80GB", "--json"]) == 0
        found[most] = json.loads(capsys.readouterr().out)["phases"]
    teacher = model("qwen2", 290, 1, hidden_size=96)
    size = 4 * sum(each.numel() for each in (*teacher.parameters(), *teacher.buffers()))
    assert {held["reference"] for held in found[6].values()} == {size}
    assert found[600]["forward"]["rows"] > 4 * 600 * 96  # the teacher's hidden states of a row
