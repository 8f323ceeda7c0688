"""What `lowtide.compat.peft` takes from the inside of PEFT is there."""

import sys
import types
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, LoraGAConfig, PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.loraga import preprocess_loraga
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowtide.compat.peft import (
    adapter_active,
    adapters_are_new,
    adapters_switched_off,
    caches_kept,
    gradients_are_noted,
    parameters_of_adapters,
    same_weights_trained,
    train_beside_adapters,
    without_bitsandbytes,
)

TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**TINY))  # type: ignore[arg-type]


@pytest.fixture
def model():
    return build()


def test_virtual_tokens_say_that_they_are_switched_off(model):
    wrapped = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert not adapters_switched_off(wrapped)
    with wrapped.disable_adapter():
        switched_off = adapters_switched_off(wrapped)
    assert switched_off, "PeftModel.disable_adapter notes virtual tokens otherwise than by _adapters_disabled"


def test_a_layers_cache_is_as_it_was(model):
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    layer = wrapped.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer._caches, dict), "a LoRA layer has no dictionary _caches any more"
    with caches_kept(layer):
        layer._caches["norm"] = 1
    assert layer._caches == {}


def test_no_adapter_asks_for_bitsandbytes(model, monkeypatch):
    """A stand-in for the package fails the test where it is looked into."""

    class Untouched(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"PEFT looked into bitsandbytes, for {name}")

    monkeypatch.setitem(sys.modules, "bitsandbytes", Untouched("bitsandbytes"))
    before = peft.tuners.lora.model.is_bnb_available
    with without_bitsandbytes():
        assert not peft.tuners.lora.model.is_bnb_available(), "PEFT asks by another name whether bitsandbytes is there"
        wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert type(wrapped.base_model.model.model.layers[0].self_attn.q_proj) is peft.tuners.lora.Linear
    assert peft.tuners.lora.model.is_bnb_available is before


def two_adapters(model):
    """Only the second has a head of its own."""
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    second = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    wrapped.add_adapter("second", second)
    wrapped.base_model.model.lm_head.modules_to_save["second"].weight.data.add_(1)
    wrapped.set_requires_grad("second")
    return wrapped


def test_an_adapter_is_active_for_a_while_and_all_stay_trained(model):
    wrapped, ids = two_adapters(model), torch.arange(5)[None]
    first = wrapped(ids).logits
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    assert any("default" in name for name in trained)
    assert any("modules_to_save.second" in name for name in trained)
    with adapter_active(wrapped, "second"):
        found = wrapped(ids).logits
        assert trained == {name for name, p in wrapped.named_parameters() if p.requires_grad}
    assert torch.equal(wrapped(ids).logits, first), "layers of PEFT take the active adapter from more than they had"
    wrapped.set_adapter("second")
    assert torch.equal(wrapped(ids).logits, found), "layers of PEFT do not take the active adapter from _active_adapter"


def test_switched_off_and_on_again_the_same_is_trained(model):
    wrapped = two_adapters(model)
    next(p for name, p in wrapped.named_parameters() if "lora_A.default" in name).requires_grad_(False)
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    with same_weights_trained(wrapped), wrapped.disable_adapter():
        pass
    assert trained == {name for name, p in wrapped.named_parameters() if p.requires_grad}


def test_parameters_of_adapters_are_those_without_effect_while_they_are_off():
    model = get_peft_model(build(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    found = parameters_of_adapters(model)
    names = {name for name, p in model.named_parameters() if p in found}
    assert names == {name for name, _ in model.named_parameters() if "lora_" in name or "modules_to_save" in name}
    virtual: Any = get_peft_model(build(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    assert parameters_of_adapters(virtual) == {*virtual.prompt_encoder.parameters()}


def test_adapters_are_new_until_one_of_their_numbers_tells():
    def made() -> Any:
        return get_peft_model(build(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))

    assert adapters_are_new(made())
    for part in ("lora_B", "modules_to_save"):
        model = made()
        next(p for name, p in model.named_parameters() if part in name).data[0, 0] += 1
        assert not adapters_are_new(model), part
    assert not adapters_are_new(get_peft_model(build(), LoraConfig(target_modules=["q_proj"], use_dora=True)))


def test_a_module_is_trained_and_saved_beside_adapters_that_are_there():
    model: Any = get_peft_model(build(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    saved = model.base_model.model.lm_head.modules_to_save["default"].weight
    saved.data += 1
    before = saved.detach().clone()
    model.base_model.model.add_module("value_head", nn.Linear(8, 1))
    train_beside_adapters(model, "value_head")
    state = get_peft_model_state_dict(model)
    assert any(name.endswith("value_head.weight") for name in state)
    trained = [name for name, p in model.named_parameters() if p.requires_grad and "value_head" in name]
    assert trained
    assert all("modules_to_save" in name for name in trained)
    assert torch.equal(model.base_model.model.lm_head.modules_to_save["default"].weight, before)


def test_gradients_that_were_noted_for_lora_ga_are_seen():
    """PEFT leaves them at the layers, under a name of its own."""
    model = nn.Sequential(nn.Linear(3, 2))
    config = LoraConfig(target_modules=["0"], init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    assert not gradients_are_noted(model)
    preprocess_loraga(model, config, lambda: model(torch.ones(1, 3)).sum().backward())
    assert gradients_are_noted(model)
