"""Tiny models with adapters of every kind, on dense and on quantized bases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from lowtide.engine.weights.loading import adapt, load_model
from lowtide.ops.layers.stacks import plain_stacks, shapes_of_stacks
from tests.support.models.causal_families import tiny_causal

VOCAB, HIDDEN = 96, 64


def build(model_type: str = "llama", dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, **changes}
    config = AutoConfig.for_model(
        model_type, **sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2
    )
    return AutoModelForCausalLM.from_config(config).to(dtype)


def moe() -> PreTrainedModel:
    return build("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)


def with_head_bias() -> PreTrainedModel:
    model = build()
    model.lm_head = torch.nn.Linear(HIDDEN, VOCAB)
    return model


CASES = {
    "lora": (build, {}),
    "rslora": (build, {"use_rslora": True}),
    "dora": (build, {"use_dora": True}),
    "head saved": (build, {"modules_to_save": ["lm_head"]}),
    "embedding saved": (build, {"modules_to_save": ["embed_tokens"]}),
    "lora on the head": (build, {"target_modules": ["q_proj", "lm_head"]}),
    "lora with biases": (with_head_bias, {"target_modules": ["q_proj", "lm_head"], "lora_bias": True}),
    "lora with a bias on a head without": (build, {"target_modules": ["lm_head"], "lora_bias": True}),
    "lora on the embedding": (build, {"target_modules": ["q_proj", "embed_tokens"]}),
    "lora on both": (build, {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied": (lambda: build(tie_word_embeddings=True), {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied head": (lambda: build(tie_word_embeddings=True), {"target_modules": ["q_proj", "lm_head"]}),
    "tied both": (
        lambda: build(tie_word_embeddings=True),
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "tied saved": (
        lambda: build(tie_word_embeddings=True),
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied both saved": (
        lambda: build(tie_word_embeddings=True),
        {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "dora on the embedding": (build, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "experts": (moe, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    "trainable tokens": (build, {"trainable_token_indices": [5, 9]}),
    "trainable tokens, tied": (
        lambda: build(tie_word_embeddings=True),
        {"trainable_token_indices": [5, 9]},
    ),
}


MERGED = {name: case for name, case in CASES.items() if "lora_bias" not in case[1]}
"""Those that can be: the bias of an adapter goes into one that is there."""


def adapted(model, **options):
    """With adapters that are far from zero, the same for the same model."""
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], **options}
    model = adapt(model, LoraConfig(**options), gradient_checkpointing=False)
    torch.manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    return model


def bitsandbytes_4bit():
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def bitsandbytes_nested():
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)


def bitsandbytes_8bit():
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True)


def torchao(kind: str, **options):
    return TorchAoConfig(getattr(pytest.importorskip("torchao.quantization"), kind)(**options))


def torchao_4bit():
    quantization = pytest.importorskip("torchao.quantization")
    return torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=quantization.PerGroup(32))


QUANTIZED = {
    "nf4": bitsandbytes_4bit,
    "nf4 nested": bitsandbytes_nested,
    "LLM.int8": bitsandbytes_8bit,
    "int8": lambda: torchao("Int8WeightOnlyConfig"),
    "float8": lambda: torchao("Float8WeightOnlyConfig"),
    "int4 in bytes": torchao_4bit,
}


def quantized(folder, config, dtype=torch.float32) -> PreTrainedModel:
    return load_model(folder, dtype=str(dtype).removeprefix("torch."), quantization_config=config)


def dequantized(folder, model: PreTrainedModel) -> PreTrainedModel:
    """The dense model with the values that the quantized one stands for."""
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, module in dense.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(dequantize_module_weight(model.get_submodule(name)))
    return dense


STACKS = {
    "qwen3_moe": ["experts.gate_up_proj", "experts.down_proj"],
    "gpt_oss": ["experts.gate_up_proj", "experts.down_proj"],  # [experts, in, out], biases, gates between
    "nemotron_h": ["experts.up_proj", "experts.down_proj"],  # no gates
}


def adapted_experts(
    kind: str,
    rank: int = 3,
    dtype: torch.dtype = torch.float32,
    stacks: list[str] | None = None,
    store: Callable[..., None] | None = None,
) -> Any:
    """A tiny mixture with adapters of experts that are not 0.

    Args:
        store: quantizes a stack of experts.
    """
    torch.manual_seed(0)
    model: Any = tiny_causal(kind).to(dtype)
    for experts, name in plain_stacks(model) if store else ():
        store(experts, name, torch.device("cpu"))
    with shapes_of_stacks(model):
        config = LoraConfig(r=rank, target_modules=["q_proj"], target_parameters=stacks or STACKS[kind])
        model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.3)
    return model
