"""A PEFT configuration that cannot be used is refused in a sentence with the option, and so is a folder of adapters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from support.models.tiny_llama import tiny_llama

from lowtide.engine.weights.complete_weights import base_of_adapters, load_adapters
from lowtide.engine.weights.loading import adapt, check_trained_whole

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "integers": ({"target_modules": ["q_proj", 2]}, "target_modules holds 2: name modules by text"),
    "tokens": ({"trainable_token_indices": [99_999]}, r"IndexError.*correct trainable_token_indices=\[99999\]"),
    "tokens of a module": ({"trainable_token_indices": {"embed_tokens": [64]}}, "embed_tokens': .64"),
    "a token below 0": ({"trainable_token_indices": [-5]}, "counted from 0"),
    "no token": ({"trainable_token_indices": []}, "trainable_token_indices lists no token"),
    "no invocation": ({"alora_invocation_tokens": []}, "alora_invocation_tokens lists no token"),
    "no token of a module": ({"trainable_token_indices": {"embed_tokens": []}}, "lists no token"),
    "a package": ({"megatron_config": {"a": 1}}, r"pip install megatron.*megatron_config=\{'a': 1\}"),
    "a rank that is text": ({"r": "8"}, "TypeError.*correct r='8', target_modules"),
    "a rank that is no integer": ({"rank_pattern": {"q_proj": 2.5}}, r"rank_pattern=\{'q_proj': 2.5\}"),
    "biases": ({"bias": "some"}, "NotImplementedError.*correct bias='some'"),
    "a layer": ({"layer_replication": [[0, 9]]}, "IndexError.*layer_replication"),
    "dropout that is NaN": ({"lora_dropout": math.nan}, "lora_dropout of the LoraConfig holds nan: it must be finite"),
    "a scale of a module": ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern of the LoraConfig holds inf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_configuration_is_refused_with_its_option(case):
    options, said = WRONG[case]
    with pytest.raises(ValueError, match=said):
        adapt(tiny_llama(), LoraConfig(**{"target_modules": ["q_proj"], **options}), gradient_checkpointing=False)


def test_modules_to_train_whole_are_named_by_text():
    with pytest.raises(ValueError, match="modules_to_save holds 3"):
        check_trained_whole(LoraConfig(target_modules=["q_proj"], modules_to_save=[3]), tiny_llama())  # type: ignore[list-item]


OF_A_FOLDER: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"r": 4}, "size mismatch.*adapter_config.json r=4$"),
    "no scale": ({"lora_alpha": None}, "TypeError.*lora_alpha=None"),
    "an unknown kind": ({"peft_type": "NONE"}, "peft_type='NONE'"),
    "kinds in a list": ({"peft_type": ["LORA"]}, "peft_type=.'LORA'."),
    "tokens": ({"trainable_token_indices": [99_999]}, "trainable_token_indices"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules=["q_proj"])).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", OF_A_FOLDER)
def test_a_folder_is_refused_with_the_option_of_its_configuration(folder, case):
    changes, said = OF_A_FOLDER[case]
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=f"the adapters in .*{said}"):
        load_adapters(tiny_llama(), str(folder))


def test_a_folder_whose_scale_is_no_number_is_refused(folder):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": math.nan}))
    with pytest.raises(ValueError, match=r"lora_alpha of adapter_config\.json holds nan: it must be finite"):
        load_adapters(tiny_llama(), str(folder))


def test_lists_of_names_that_peft_would_compare_for_minutes_are_refused(folder):
    path = folder / "adapter_config.json"
    many = [str(number) for number in range(20_001)]
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": many}))
    with pytest.raises(ValueError, match=r"target_modules of adapter_config\.json holds 20,001 names: at most 20,000"):
        load_adapters(tiny_llama(), str(folder))


@pytest.mark.parametrize(
    ("base", "said"),
    [([1], "a model's name is text"), (None, "which model"), ("", "its own"), ("m\0", "no model's name holds a null")],
)
def test_a_folder_that_names_no_other_model_is_refused(folder, base, said):
    path = folder / "adapter_config.json"
    named = str(folder) if base == "" else base
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": named}))
    with pytest.raises(ValueError, match=said):
        base_of_adapters(str(folder))


def test_a_folder_whose_base_is_adapters_is_refused(folder, tmp_path):
    (tmp_path / "other").mkdir()
    named = {"base_model_name_or_path": str(folder)}
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match=r"other/adapter_config.json names .*, which is a folder of adapters itself"):
        base_of_adapters(str(tmp_path / "other"))


def test_a_folder_without_weights_says_so(folder):
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no adapter_model"):
        load_adapters(tiny_llama(), str(folder))
