"""Adapters leave the precision of what they adapt alone, and quantized weights can be trained through."""

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.loading import adapt, keep_differentiable


def test_what_a_quantized_model_has_in_16_bits_stays_so():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.is_loaded_in_4bit = True
    adapted = adapt(model, LoraConfig(r=2, target_modules=["q_proj"]), gradient_checkpointing=True)
    kept = {p.dtype for name, p in adapted.named_parameters() if "lora" not in name}
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert kept == {torch.bfloat16}
    assert trained
    assert all("lora" in name for name in trained)


def test_four_bit_layers_are_not_packed_for_inference():
    packing, other = nn.Linear(2, 2), nn.Linear(2, 2)
    packing.support_avx512bf16_for_cpu = True  # as bitsandbytes' Linear4bit has it
    keep_differentiable(nn.Sequential(packing, other))
    assert packing.support_avx512bf16_for_cpu is False
    assert not hasattr(other, "support_avx512bf16_for_cpu")
