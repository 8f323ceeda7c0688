"""What of a model's config llama.cpp reads, by family: one record each.

Each family is proved by loading a file in llama.cpp and comparing its text with transformers' (`tests`). What llama.cpp
assumes of a family and a config may say otherwise is refused, since the file would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
Write = Callable[[Any, Config], None]
"""Writes further keys of a config with gguf's writer."""


@dataclass(frozen=True)
class Family:
    """How a type of models is written."""

    arch: str
    """The name of gguf's `MODEL_ARCH`."""
    permutes: bool = False
    """Whether rows of query and key weights are interleaved, as llama.cpp rotates neighbours in this family."""
    adds_one: bool = False
    """Whether norms multiply by 1 + weight."""
    keys: Write | None = None
    why_not: Callable[[Config], str | None] | None = None
    """What of a config llama.cpp would pass over, as a part of a sentence; None where there is nothing."""


def head_dim(config: Config) -> int:
    """Of a head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope(config: Config) -> Mapping[str, Any]:
    """The settings of rotary positions: of the layers that see everything, where kinds of layers have their own."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = found.get("full_attention", found)
    return {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default", **found}


def _window(config: Config) -> str | None:
    """Of families whose windows llama.cpp does not have."""
    window = config.get("sliding_window")
    on = config.get("use_sliding_window", True) and window is not None
    return f"has a sliding window of {window} tokens" if on and window < config["max_position_embeddings"] else None


def _scale(config: Config) -> str | None:
    """llama.cpp divides by the root of the head's width."""
    scalar = config.get("query_pre_attn_scalar")
    if scalar is not None and scalar != head_dim(config):
        return f"has query_pre_attn_scalar={scalar}, which is not its head_dim of {head_dim(config)}"
    return None


def _gemma2(writer: Any, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _gemma3(writer: Any, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])


def _gemma3_why_not(config: Config) -> str | None:
    kinds = config.get("layer_types") or ()
    wanted = ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(len(kinds))]
    if list(kinds) != wanted:
        return "has windows in other layers than five of six"
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta", 10000.0)
    return _scale(config) or (f"has a local rope_theta of {local:g}, which is not 10000" if local != 10000.0 else None)


def _granite(writer: Any, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _smollm3_why_not(config: Config) -> str | None:
    flags = config.get("no_rope_layers") or ()
    if list(flags) != [int((n + 1) % 4 != 0) for n in range(len(flags))]:
        return "leaves out positions in other layers than every fourth"
    return _window(config)


def _cohere(writer: Any, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])


def _stablelm(writer: Any, config: Config) -> None:
    writer.add_parallel_residual(bool(config.get("use_parallel_residual")))


def _biased_mlp(config: Config) -> str | None:
    return "has biases in its MLP" if config.get("mlp_bias") else _window(config)


FAMILIES: dict[str, Family] = {
    "llama": Family("LLAMA", permutes=True, why_not=_biased_mlp),
    "mistral": Family("LLAMA", permutes=True, why_not=_window),
    "qwen2": Family("QWEN2", why_not=_window),
    "qwen3": Family("QWEN3", why_not=_window),
    "gemma": Family("GEMMA", adds_one=True),
    "gemma2": Family("GEMMA2", adds_one=True, keys=_gemma2, why_not=_scale),
    "gemma3_text": Family("GEMMA3", adds_one=True, keys=_gemma3, why_not=_gemma3_why_not),
    "granite": Family("GRANITE", permutes=True, keys=_granite),
    "olmo2": Family("OLMO2"),
    "smollm3": Family("SMOLLM3", permutes=True, why_not=_smollm3_why_not),
    "seed_oss": Family("SEED_OSS"),
    "arcee": Family("ARCEE", permutes=True),
    "starcoder2": Family("STARCODER2", why_not=_window),
    "hunyuan_v1_dense": Family("HUNYUAN_DENSE"),
    "stablelm": Family("STABLELM", keys=_stablelm),
    "exaone4": Family("EXAONE4", why_not=_window),
    "glm4": Family("GLM4"),
    "cohere": Family("COMMAND_R", keys=_cohere),
}
"""By `model_type`."""
