"""Adapters leave the precision of what they adapt alone, and quantized weights can be trained through."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lowtide.engine.weights.loading import adapt, release_file


def tiny_model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_what_a_quantized_model_has_in_16_bits_stays_so():
    model = tiny_model()
    model.is_loaded_in_4bit = True
    adapted = adapt(model, LoraConfig(r=2, target_modules=["q_proj"]), gradient_checkpointing=True)
    kept = {p.dtype for name, p in adapted.named_parameters() if "lora" not in name}
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert kept == {torch.bfloat16}
    assert trained
    assert all("lora" in name for name in trained)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_quantized_model_lets_go_of_its_file(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = [weight.detach().clone() for weight in model.parameters()]
    if str(tmp_path) not in Path("/proc/self/maps").read_text():
        pytest.skip("the weights were read, not mapped")
    release_file(model)  # as it is, it may go on mapping its weights
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    model.is_loaded_in_4bit = True
    release_file(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert all(torch.equal(weight, other) for weight, other in zip(model.parameters(), before, strict=True))
