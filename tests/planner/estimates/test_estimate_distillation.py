"""What is predicted of a run that distils: its teacher beside the student, and completions that either writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import lowtide
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import Estimate, estimate_run
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.planner.tracing.teachers import DescribedTeacher
from lowtide.planner.tracing_process import tracing_here
from lowtide.planning import estimate_method
from lowtide.run.options.configs import method_of
from tests.support.references.parity_world import tokenizer
from tests.support.runs.distilling import talks

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STUDENT, TEACHER = LlamaConfig(**SIZES), Qwen2Config(**{**SIZES, "hidden_size": 96, "num_hidden_layers": 4})
CPU = device_named("cpu")


def estimated(folder: Any, teacher: Any = TEACHER, **options: Any) -> Estimate:
    always = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    config = lowtide.GKDConfig(**always | {"per_device_train_batch_size": 2, "lmbda": 0.0} | options)
    described = DescribedTeacher.of(teacher, config)
    run = FakeRun(method_of(config), config, STUDENT, talks(8), processing_class=tokenizer(), teacher_model=described)
    return estimate_run(run, CPU, beside=0)


def held_by_teacher(config: Any = TEACHER, dtype: torch.dtype = torch.float32) -> int:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))


@pytest.mark.slow
def test_the_teachers_weights_are_in_all_phases(tmp_path):
    found = estimated(tmp_path)
    assert {held["reference"] for held in found.phases.values()} == {held_by_teacher()}


def test_the_teachers_dtype_is_its_own(tmp_path):
    TEACHER.save_pretrained(tmp_path / "teacher")
    options = {"teacher_model_name_or_path": str(tmp_path / "teacher")}
    found = estimated(tmp_path, teacher=None, **options, teacher_model_init_kwargs={"dtype": "bfloat16"})
    assert {held["reference"] for held in found.phases.values()} == {held_by_teacher(dtype=torch.bfloat16)}


@pytest.mark.parametrize(("options", "writes"), [({}, False), ({"lmbda": 0.5}, True), ({"seq_kd": True}, True)])
def test_writing_is_a_phase(options, writes, tmp_path):
    found = estimated(tmp_path, **options)
    assert ("generate" in found.phases) == writes
    if writes:
        assert found.phases["generate"]["keys"] > 0


@pytest.mark.slow
def test_longer_completions_take_more(tmp_path):
    short, long = (estimated(tmp_path, lmbda=1.0, max_new_tokens=most) for most in (100, 2000))
    assert long.phases["generate"]["keys"] > 3 * short.phases["generate"]["keys"]
    assert long.phases["backward"]["activations"] > 3 * short.phases["backward"]["activations"]


@pytest.mark.slow
def test_a_teacher_that_is_asked_takes_nothing(tmp_path):
    """Its log-probabilities alone, and no chunk of its logits."""
    loaded, asked = (
        estimated(tmp_path, **each)
        for each in ({}, {"teacher": None, "teacher_model_server_url": "http://nowhere:1", "loss_top_k": 8})
    )
    assert {held.get("reference", 0) for held in asked.phases.values()} == {0}
    assert asked.peak_bytes < loaded.peak_bytes - held_by_teacher() // 2


def test_a_run_without_a_teacher_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no teacher"):
        estimated(tmp_path, teacher=None)


@pytest.mark.slow
def test_a_student_that_writes_all_has_no_phase_of_rewards_or_scores(tmp_path):
    """On-policy distillation: the teacher runs in the step."""
    always = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    config = lowtide.DistillationConfig(**always, per_device_train_batch_size=2, max_completion_length=20)
    rows = Dataset.from_list(rows_of([7, 11, 5, 9], writes=True))
    described = DescribedTeacher.of(TEACHER, config)
    run = FakeRun(method_of(config), config, STUDENT, rows, prepared=True, teacher_model=described)
    found = estimate_run(run, CPU, beside=0)
    assert {held["reference"] for held in found.phases.values()} == {held_by_teacher()}
    assert found.phases["generate"]["keys"] > 0
    assert not {"reward", "score"} & found.phases.keys()


@pytest.mark.slow
def test_by_names_as_the_command_asks(tmp_path):
    for name, config in (("student", STUDENT), ("teacher", TEACHER)):
        config.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    options = {"teacher_model_name_or_path": str(tmp_path / "teacher"), "per_device_train_batch_size": 2}
    found = estimate_method("gkd", str(tmp_path / "student"), talks(8), config=options)
    assert {held["reference"] for held in found.phases.values()} == {held_by_teacher()}


@pytest.mark.slow
def test_a_well_known_teacher_needs_no_hub(monkeypatch):
    def asked(url: str) -> None:
        raise AssertionError(f"the hub was asked for {url}")

    monkeypatch.setattr("lowtide.planner.tracing.described_model.get_hf_file_metadata", asked)
    known = "HuggingFaceTB/SmolLM2-135M"
    options = {"teacher_model_name_or_path": known, "lmbda": 0.0, "save_strategy": "no"}
    with tracing_here():
        found = estimate_method("gkd", known, lengths="64x2", config=options)
    assert all(held["reference"] > 4 * 134e6 for held in found.phases.values())
