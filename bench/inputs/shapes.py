"""The models that are measured, from configs embedded here: random weights, nothing downloaded.

Speed and memory depend on a model's shape, not on what it knows. `llama-22m` spends most of its parameters on
the vocabulary, as small models do, so that two CPU cores show what the head costs. The Qwen shapes are the published
ones (config.json of Qwen/Qwen2.5-0.5B, 1.5B and 7B, and of Qwen/Qwen3-8B), and so are those of Llama-2-7B and of
Llama-3.1 with 8B, 70B and 405B, without the scaling of their rotary embeddings.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

LLAMA_22M = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

LLAMA_60M = LLAMA_22M | {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 9}

QWEN35_24M = LLAMA_22M | {
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}

QWEN_05B = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}

QWEN_15B = QWEN_05B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}

QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}

LLAMA_7B = LLAMA_8B | {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}

LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}

LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16_384,
    "intermediate_size": 53_248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Shape:
    """A model's config, and where and in which precision it is measured."""

    config: dict[str, Any]
    device: str
    dtype: str
    """Storage and compute dtype of weights, gradients and optimizer states."""


SHAPES = {
    "llama-22m": Shape(LLAMA_22M, device="cpu", dtype="float32"),
    "qwen2.5-0.5b": Shape(QWEN_05B, device="cuda", dtype="bfloat16"),
    "qwen2.5-7b": Shape(QWEN_7B, device="cuda", dtype="bfloat16"),
}


KNOWN_SHAPES = SHAPES | {
    "llama-60m": Shape(LLAMA_60M, device="cpu", dtype="float32"),
    "qwen2.5-0.5b-float32": Shape(QWEN_05B, device="cpu", dtype="float32"),
    "qwen3.5-24m": Shape(QWEN35_24M, device="cpu", dtype="float32"),
}
"""With those that only some benchmarks run: of several ranks on a CPU, and of recurrent layers."""


def build_model(shape: Shape, fastest_attention: bool = False):
    """Returns a causal language model with seeded random weights, on the shape's device."""
    from transformers import AutoModelForCausalLM

    return _build(AutoModelForCausalLM, shape, fastest_attention)


def build_teacher(shape: Shape, fastest_attention: bool = False):
    """Returns a model of the same shape with twice the layers, and other weights."""
    from transformers import AutoModelForCausalLM

    deeper = replace(shape, config=shape.config | {"num_hidden_layers": 2 * shape.config["num_hidden_layers"]})
    return _build(AutoModelForCausalLM, deeper, fastest_attention, seed=1)


def build_reward_model(shape: Shape, pad_token_id: int, fastest_attention: bool = False):
    """Returns a model of the same shape that gives one value a row in place of logits."""
    from transformers import AutoModelForSequenceClassification

    options = {"num_labels": 1, "pad_token_id": pad_token_id}
    return _build(AutoModelForSequenceClassification, shape, fastest_attention, **options)


def _build(auto_class: Any, shape: Shape, fastest_attention: bool, seed: int = 0, **options: Any):
    import torch
    from transformers import AutoConfig

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**shape.config, **options)
    attention = {"attn_implementation": attention_for(shape)} if fastest_attention else {}
    with torch.device(shape.device):
        return auto_class.from_config(config, dtype=getattr(torch, shape.dtype), **attention)


def attention_for(shape: Shape) -> str:
    """Returns the fastest attention that transformers can use here without a download."""
    installed = find_spec("flash_attn") is not None
    return "flash_attention_2" if shape.device == "cuda" and installed else "sdpa"


def parameter_counts(model) -> tuple[int, int]:
    """Returns all parameters, and those that a token is multiplied with: a looked-up embedding table is not one of
    them, unless the head is tied to it."""
    total = sum(parameter.numel() for parameter in model.parameters())
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    return total, total if tied else total - table.numel()


def recomputed_parameters(model) -> int:
    """Parameters of the layers whose forward runs once more in backward, with gradient checkpointing."""
    from transformers import GradientCheckpointingLayer

    of_model = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    layers = (layer for layer in of_model if layer.gradient_checkpointing)
    return sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim > 1)
