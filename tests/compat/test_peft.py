"""What `lowtide.compat.peft` takes from the inside of PEFT is there."""

import pytest
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lowtide.compat.peft import adapters_switched_off, caches_kept

TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def model():
    return LlamaForCausalLM(LlamaConfig(**TINY))  # type: ignore[arg-type]


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
