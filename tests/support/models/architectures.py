"""Tiny models of every architecture whose exactness is tested, built from their configs.

Why: "the hook works for llama" says nothing about a model with sinks, soft-caps or chunked attention. Each entry
is small enough to run in milliseconds, and has every layer type of its family, a window shorter than the test's
segments, caps low enough to bend the logits, and initial weights large enough for attention to be far from
uniform. The settings follow the released checkpoints where they turn a feature on that the config's default
leaves off.

`RAGGED` lists what runs without padding, `RECURRENT` those of them whose layers carry a state from token to token.
`PADDED` lists what cannot: models that build their own attention, and some that carry a state. An entry is the model
type and what differs from `COMMON`; the name is the model type, or the model type and a variant.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 101
WINDOW = 6
"""Sliding windows and attention chunks, in tokens: shorter than the longer segments of the tests."""

FIRST_TOKEN = 3
"""Ids below are pad, beginning and end, which some embeddings and models treat apart."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}

SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
FULL_THEN_SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "initializer_range": 0.15}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
}

RAGGED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 1, 0],
            "moe_layers": [1, 2],
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "floor_scale": 4,  # the positions of one temperature step in layers without rotary embeddings
            "attn_scale": 0.5,
        },
    ),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **FULL_THEN_SLIDING}),
    "qwen3": ("qwen3", {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 1, **FULL_THEN_SLIDING}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **EXPERTS,
            **SLIDING_THEN_FULL,
            "use_sliding_window": True,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "norm_topk_prob": True},
    ),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": WINDOW}),
    "ministral": ("ministral", {"head_dim": 8, **SLIDING_THEN_FULL}),
    "gemma": ("gemma", GEMMA),
    "gemma2": (
        "gemma2",
        {**GEMMA, **SLIDING_THEN_FULL, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("gemma3_text", {**GEMMA, **SLIDING_THEN_FULL}),
    "gemma4": (  # keys and values shared by the last two layers, and embeddings per layer
        "gemma4_text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_moe": (  # values equal to keys in full layers, and experts
        "gemma4_text",
        {
            **SLIDING_THEN_FULL,
            "head_dim": 8,
            "global_head_dim": 16,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {"n_inner": 48, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "gpt_oss": ("gpt_oss", {**EXPERTS, **SLIDING_THEN_FULL, "head_dim": 8, "rope_parameters": YARN}),
    "opt": ("opt", {"ffn_dim": 48, "dropout": 0.0, "init_std": 0.2}),
    "olmo": ("olmo", {"clip_qkv": 1.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", SLIDING_THEN_FULL),
    "granite": ("granite", MULTIPLIERS),
    "granitemoe": ("granitemoe", {**MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**SLIDING_THEN_FULL, "logit_scale": 0.25}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW, "embedding_dropout": 0.0, "residual_dropout": 0.0}),
    "glm4": ("glm4", {"head_dim": 8}),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
    ),
    "smollm3": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0]},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "exaone4": ("exaone4", SLIDING_THEN_FULL),
    "seed_oss": ("seed_oss", {"head_dim": 8, "residual_dropout": 0.0}),
    "apertus": ("apertus", {"rope_parameters": LLAMA3_ROPE}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {"head_dim": 8}),
    "stablelm": ("stablelm", {"hidden_dropout": 0.0}),
    "nemotron": ("nemotron", {}),
    "lfm2": (  # short convolutions reach over the border of a segment
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
}

MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

DELTA_RULE = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 4}),
    "falcon_h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **MAMBA2,
            **MULTIPLIERS,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "jamba": (
        "jamba",
        {
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
            **{"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
        },
    ),
    "lfm2_moe": ("lfm2_moe", {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "lfm3": ("lfm3", {"layer_types": ["conv", "full_attention"], "head_dim": 8}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
            "num_hidden_layers": 4,
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**DELTA_RULE, "linear_num_value_heads": 2}),
    "qwen3_5": ("qwen3_5_text", DELTA_RULE),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_next": ("qwen3_next", {**DELTA_RULE, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "zamba": (
        "zamba",
        {
            **{"num_hidden_layers": 3, "layers_block_type": ["hybrid", "mamba", "hybrid"], "num_key_value_heads": 4},
            **{"n_mamba_heads": 2, "mamba_d_state": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
            "initializer_range": 0.1,  # with larger weights the float32 of its norms shows
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_hidden_layers": 3,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "chunk_size": 8,
            "num_key_value_heads": 4,
            "adapter_rank": 4,
        },
    ),
}

PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"hidden_dropout": 0.0}),
    "falcon": ("falcon", {"hidden_dropout": 0.0}),
    "minimax": ("minimax", {"num_local_experts": 4, "head_dim": 8, "block_size": 8}),
}

TYPICAL_RECURRENT = ("bamba", "mamba", "qwen3_5")
"""Those of `RECURRENT` whose tests are fast."""
TYPICAL = ("llama", "qwen3", "gemma2", "gemma3", "mixtral", "gpt2", "gpt_oss")
"""Those of `RAGGED` that differ most; tests of the others are slow."""
TYPICAL_OF_ALL = (*TYPICAL, "bloom")
"""The same of `RAGGED` and `PADDED`."""


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of one entry of `RAGGED`, `RECURRENT` or `PADDED`, with `changes` on top."""
    model_type, settings = (RAGGED | RECURRENT | PADDED)[name]
    return AutoConfig.for_model(model_type, **{**COMMON, **settings, **changes})


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model of one entry, eager, float32, training (without dropout), every parameter off its constant."""
    torch.manual_seed(seed)
    config = tiny_config(name, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model, seed)
    return model.train()


def randomize(model: nn.Module, seed: int, scale: float = 0.3) -> None:
    """Adds noise to all parameters and persistent buffers that start out constant.

    Norm weights start at one and biases at zero; left there, a missing or doubled factor would go unseen.
    """
    generator = torch.Generator().manual_seed(seed)
    persistent = model.state_dict(keep_vars=True).values()
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in persistent}.values():
            if tensor.is_floating_point() and tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(scale * torch.randn(tensor.shape, generator=generator))
