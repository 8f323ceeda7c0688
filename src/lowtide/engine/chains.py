"""Which models can run a row piece by piece, each piece going on from what earlier ones left in the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.compat.transformers import attention_implementation
from lowtide.engine.attention import NAME
from lowtide.engine.heads import head_of
from lowtide.engine.virtual_tokens import prompt_config

BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embeddings whose frequencies depend on the longest row of a forward, which a piece does not show."""


def why_not_chains(model: nn.Module, inner: Any) -> str | None:
    """What keeps a model's rows from being run in pieces, as a clause; None if nothing does.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not.
        inner: the transformers model inside.
    """
    config = inner.config.get_text_config()
    if inner.config.is_encoder_decoder:
        return "it is an encoder-decoder, whose tokens all see the whole source"
    if prompt_config(model) is not None or attention_implementation(inner.config) != NAME:
        return "the model runs padded"
    if head_of(inner).means(inner):
        return "its head reads the mean of all hidden states"
    if any(getattr(module, "is_causal", True) is False for module in _text_modules(inner)):
        return "its tokens also see those after them"
    kinds = BY_LENGTH.intersection(_rotary_kinds(getattr(config, "rope_parameters", None)))
    if kinds:
        return f"its rotary embeddings ({min(kinds)}) depend on the longest row of a forward"
    rate = attention_dropout(inner)
    if rate > 0 and model.training:
        return f"its attention dropout ({rate:g}) would be drawn anew in each piece; attention_dropout=0 ends that"
    return None


def _rotary_kinds(parameters: Any) -> Iterator[str]:
    """The kinds of rotary embeddings; some models have one for each kind of layer."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type", ""))
        for each in parameters.values():
            yield from _rotary_kinds(each)


def attention_dropout(inner: Any) -> float:
    """The largest rate at which a model's attention drops its weights in training."""
    names = ("attention_dropout", "attn_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    found = [getattr(module, name, 0.0) for module in _text_modules(inner) for name in names]
    found += [each.p for each in found if isinstance(each, nn.Dropout)]
    return max((float(each) for each in found if isinstance(each, int | float)), default=0.0)


def _text_modules(inner: Any) -> Iterator[nn.Module]:
    """The modules of a model but for those of a vision tower."""
    for name, module in inner.named_modules():
        if not any(part in ("visual", "vision_tower", "vision_model") for part in name.split(".")):
            yield module
