"""`lowtide teacher-logprobs`: what it writes, and what a run reads of it."""

import json
import shutil

import pytest

from lowtide.cli.main import main
from lowtide.data.teacher_logprobs import FACTS
from tests.support.references.parity_world import build_model, build_teacher, tokenizer
from tests.support.runs.distilling import talks


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, model in (("M", build_model("llama")), ("T", build_teacher())):
        model.save_pretrained(name)
        tokenizer().save_pretrained(name)
    talks(12).to_json("D.jsonl")
    return tmp_path


@pytest.mark.slow
def test_a_run_reads_what_was_written(here, capsys):
    options = ["--model", "M", "--dataset", "D.jsonl", "--teacher_logprobs", "said", "--loss_top_k", "5"]
    assert main(["teacher-logprobs", "gkd", *options, "--teacher_model_name_or_path", "T", "--use_cpu"]) == 0
    assert json.loads((here / "said" / FACTS).read_text()) == {"teacher": "T", "top_logprobs": 5, "temperature": 1.0}
    assert "what the teacher says of 12 texts, its 5 likeliest tokens" in capsys.readouterr().out
    shutil.rmtree(here / "T")  # nothing of the teacher is loaded
    run = ["--lmbda", "0", "--beta", "0", "--output_dir", "run", "--max_steps", "2", "--use_cpu"]
    assert main(["gkd", *options, *run]) == 0
    assert (here / "run" / "model.safetensors").exists()


def test_what_is_missing_is_told(capsys):
    assert main(["teacher-logprobs", "gkd", "--model", "M", "--dataset", "D"]) == 2
    assert "--teacher_logprobs is missing: name the folder to write" in capsys.readouterr().err
    assert main(["teacher-logprobs", "sft", "--model", "M"]) == 2
    assert "writes for methods that take --teacher_logprobs, which sft does not" in capsys.readouterr().err
