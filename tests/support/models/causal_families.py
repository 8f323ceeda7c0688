"""A tiny model of each family that transformers lists as causal language models, built from its config.

`tests.support.models.architectures` has those whose every feature is tried; here each family is tried once, in the form
that its config's defaults give at small sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.models.architectures import COMMON, MAMBA2, PADDED, RAGGED, RECURRENT, VOCAB, randomize

LISTED = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LONGEST = 512
"""Positions of each model."""

_WIDTH = dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 32)
_INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner"), 48)
_LAYERS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
}
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
)
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_DROPOUTS = dict.fromkeys(("layerdrop", "decoder_layerdrop", "encoder_layerdrop"), 0.0)
SIZES: dict[str, Any] = {
    **COMMON,
    **_WIDTH,
    **_INNER,
    **_LAYERS,
    **_HEADS,
    **_EXPERTS,
    **_DROPOUTS,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), LONGEST),
    **{"num_kv_heads": 2, "head_dim": 8, "rotary_dim": 4, "sliding_window": 6, "attention_chunk_size": 6},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2},
    **{"num_shared_experts": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"qk_head_dim": 16, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **MAMBA2,
    **{"use_cache": False, "is_decoder": True, "num_mtp_layers": 0, "num_nextn_predict_layers": 0},
    **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
}
"""What a config is given of the names that it has."""

_LATENT = {"num_key_value_heads": 4}
"""Of attention whose keys come of one latent vector."""
_DSA = {**_LATENT, "index_n_heads": 16}
"""Of an indexer whose scores are sums over heads of what is above zero. With few heads many sums are zero, and which of
equal scores `torch.topk` takes depends on the length of the row."""
_QWEN4 = {
    **{"layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1},
    **{"indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4},
}
_GEMMA4 = RAGGED["gemma4"][1]
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), _DSA),
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3]},
    "blt_local_encoder": {"hidden_size_global": 32},
    "blt_local_decoder": {"hidden_size_global": 32},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            **{"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
            **{"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        },
    },
    "cpmant": {"dim_ff": 48, "dim_head": 8},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"o_lora_rank": 16},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {**_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_vision_encoder": {
        **{"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 32, "adapter_out_dim": 32},
        "pyramid_num_routed": [-1, -1],
    },
    "dots3_note_audio_encoder": {"downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": {**_DSA, "mlp_layer_types": ["dense", "sparse"]},
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 4, "activation_sparsity_pattern": None},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "hy_v4": _DSA,
    "inkling2_text": {
        "swa_num_key_value_heads": 2,
        "unpadded_vocab_size": VOCAB - 5,
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
    },
    "inkling_text": {"unpadded_vocab_size": VOCAB - 5, "logits_mup_width_multiplier": 2.0},
    "longcat_flash": {
        **_LATENT,
        "expert_ffn_hidden_size": 16,
        "ffn_hidden_size": 48,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "minimax_m3_vl_text": {
        **{"layer_types": ["minimax_m3_sparse", "full_attention"], "index_block_size": 4, "index_topk_blocks": 2},
    },
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _QWEN4),
    "reformer": {
        **{"axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 48, "num_buckets": 4},
        **{"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "hash_seed": 0},
    },
    "roc_bert": {
        **{"pronunciation_embed_dim": 8, "pronunciation_vocab_size": VOCAB},
        **{"shape_embed_dim": 8, "shape_vocab_size": VOCAB},
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}
"""What differs from `SIZES` in a family."""
WHOLE = dict(reversed([*RAGGED.values(), *RECURRENT.values(), *PADDED.values()]))
"""What differs from `COMMON` in the families of `tests.support.models.architectures`."""


def tiny_config(kind: str) -> PreTrainedConfig:
    """The config of a family at small sizes, without dropout."""
    if kind in WHOLE:
        return CONFIG_MAPPING[kind](**{**COMMON, "max_position_embeddings": LONGEST, **WHOLE[kind]})
    return _small(CONFIG_MAPPING[kind], kind)


def _small(of_kind: Any, kind: str) -> PreTrainedConfig:
    try:
        plain = vars(of_kind())
    except (TypeError, ValueError):  # its defaults do not go together
        plain = dict.fromkeys(SIZES, 0)
    known = {**plain, **dict.fromkeys(getattr(of_kind, "attribute_map", {}))}
    given = {n: v for n, v in SIZES.items() if plain.get(n) is not None or (n in known and n.endswith("token_id"))}
    given |= {n: v for n, v in SIZES.items() if n in ("use_cache", "is_decoder")}
    given |= {n: type(v)(0) for n, v in plain.items() if isinstance(v, (int, float)) and ("drop" in n or "jitter" in n)}
    inside = {n: v for n, v in plain.items() if isinstance(v, PreTrainedConfig)}
    given |= {n: _small(type(v), v.model_type).to_dict() for n, v in inside.items()}
    return of_kind(**{**given, **SETTINGS.get(kind, {})})


def tiny_causal(kind: str) -> PreTrainedModel:
    """The model of a family, eager, float32, training (without dropout), every parameter off its constant."""
    torch.manual_seed(0)
    config = tiny_config(kind)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model, 0, 0.1)
    return model.train()


REFUSED: dict[str, str] = {
    "cpmant": "padding after a row changes what the row's tokens see",
    "hrm_text": "attends in both directions within a prompt",
    "prophetnet": "makes its logits of something else than its body's last hidden states",
    "xlm": "is a masked language model",
}
"""Families that are not trained, and what the message says."""
UNTRIED: dict[str, str] = {
    "gemma3n": "requires the timm library",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "gemma4_unified_assistant": "shared_kv_states cannot be None",
    "musicgen": "object has no attribute 'dropout'",
    "musicgen_melody": "object has no attribute 'dropout'",
    "reformer": "has to be a multiple of least common multiple chunk_length",
}
"""Families whose own forward takes no row of text here, and what transformers says. One lacks its vision tower; drafts
read another model's keys; decoders of sounds are given their whole model's config by the mapping; and one trains on
rows of some lengths alone."""
TRAINED = tuple(kind for kind in LISTED if kind not in {**REFUSED, **UNTRIED})
