"""The attention of one layer of a model: what it asks for, and what its tokens gather by the plan of their batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.cached_attention import CachedPlan, Rotary
from lowtide.ops.attention.chained_attention import chained_attention
from lowtide.ops.attention.varlen_attention import AttentionRules, varlen_attention


def asked_by(module: Any, given: Mapping[str, Any], scale: float | None, dropout: float = 0.0) -> AttentionRules:
    """What a layer asks of its attention.

    Args:
        module: its attention.
        given: what it passes to the attention function of transformers beside heads.

    Raises:
        ValueError: its biases are made in a way that is not known.
    """
    return {
        "scale": scale,
        "window": _window(module, given),
        "chunk": _chunk(module),
        "softcap": given.get("softcap"),
        "sinks": given.get("s_aux"),
        "dropout": dropout,
        "causal": getattr(module, "is_causal", True),
        "bias": _bias(given.get("position_bias")),
    }


def layer_attention(
    module: Any,
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "keys kv_heads dim"],
    value: Float[Tensor, "keys kv_heads value_dim"],
    plan: AttentionPlan | CachedPlan,
    asked: AttentionRules,
    *,
    whose: Tensor,
    rotary: Rotary | None = None,
) -> Float[Tensor, "tokens heads value_dim"]:
    """What the tokens of a batch gather.

    Args:
        module: the layer's attention, which tells it from all others.
        plan: how they attend; not of ranks that split them.
        whose: the keys as the layer was given them, before any view of them was made: layers that share keys have one
            tensor of them.
        rotary: by which queries and keys are turned first, where keys are kept; None: they are turned.
    """
    if isinstance(plan, CachedPlan):
        return plan.attend(plan.stands_for(module, whose), query, key, value, asked, rotary)
    if plan.piece is None:
        return varlen_attention(query, key, value, plan, **asked)
    plan.piece.meet(module, whose)
    return chained_attention(module, query, key, value, plan, **asked)


def _bias(bias: Tensor | None) -> Tensor | None:
    """Biases by distance, of a layer that has them.

    Raises:
        ValueError: they are those of each two tokens, of a model that makes them in a way that is not known.
    """
    if bias is None or bias.ndim == 0:
        return None
    if bias.ndim != 2:
        raise ValueError("its attention has biases for each two tokens of a row")
    return bias


def _window(module: Any, given: Mapping[str, Any]) -> int | None:
    """Most models pass the window; Qwen2-MoE leaves it to the mask and to an attribute of its sliding layers."""
    window = given["sliding_window"] if "sliding_window" in given else getattr(module, "sliding_window", None)
    return window or None


def _chunk(module: Any) -> int | None:
    """Llama 4 says in its mask alone that a layer attends within stretches of the sequence."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or kinds[getattr(module, "layer_idx", 0) or 0] != "chunked_attention":
        return None
    return getattr(config, "attention_chunk_size", None)
