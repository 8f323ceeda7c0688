"""The shapes that are built in: found by the names people type, and with as many parameters as were published."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowtide.planner.answers.known_models import known_config, known_models, known_name

OF_A_FAMILY = ("Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-1B", "google/gemma-3-1b", "openai/gpt-oss-20b")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("google/gemma-3-4b-pt", "google/gemma-3-4b"),
        ("Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-24B-Base-2501"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
        ("OLMo-2-0425-1B-Instruct", "allenai/OLMo-2-0425-1B"),
        ("TinyLlama-1.1B-Chat-v1.0", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("Mistral-7B-Instruct-v0.2", None),
        ("Meta-Llama-3.1-405B-Instruct", None),
        ("meta-llama/Meta-Qwen2.5-7B", None),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", None),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", None),
        ("Meta-Llama-3.1-8B-Instruct-bnb-4bit", None),
        ("Qwen2.5-Coder-7B-Instruct", None),
        ("Qwen2.5-7B-Instruct-1M", None),
        ("Italian-Qwen2.5-7B", None),
        ("unsloth/Llama-3.1-8B", None),
        ("nobody/of-that-name", None),
    ],
)
def test_a_model_is_found_by_what_people_type(typed, name):
    assert known_name(typed) == name


@pytest.mark.parametrize("name", sorted(known_models()))
def test_each_is_found_by_its_own_name(name):
    assert known_name(name) == known_name(name.split("/")[-1]) == name


def test_a_folder_is_no_well_known_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-7B").mkdir()
    assert known_name("Qwen2.5-7B") is None


def _parameters(name: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known_config(name))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", OF_A_FAMILY)
def test_a_shape_has_the_parameters_that_were_published(name):
    assert _parameters(name) == known_models()[name]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*known_models()} - {*OF_A_FAMILY}))
def test_every_shape_has_them(name):
    assert _parameters(name) == known_models()[name]["parameters"]


def test_there_are_some_forty_of_them_of_many_families():
    families = {each["config"]["model_type"] for each in known_models().values()}
    assert len(known_models()) >= 40
    assert len(families) >= 10
