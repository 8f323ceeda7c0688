"""Attention over segments of unequal length, some of which share a prefix.

Queries are the tokens of a segment; keys are the tokens of its prefix, if it has one, then its own. The mask is
causal and aligned at the end, unless a layer says that it is not causal, optionally with a sliding window. No mask of
tokens x tokens exists anywhere, and no segment ever sees another one that is not its prefix.

Several backends stand behind one function; the first of `BACKENDS` that can serve a call does.

A plan may say that keys are of another sequence of tokens (cross attention), whose segments are the prefixes then.

Shapes: `heads` query heads, `kv_heads` key and value heads (`heads` is a multiple of it), `dim` a head's width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.ops.attention.attention_flash import (
    flash2_attention,
    flash3_attention,
    torch_varlen_attention,
    why_not_flash2,
    why_not_flash3,
    why_not_varlen,
)
from lowtide.ops.attention.attention_flex import flex_ragged_attention, why_not_flex
from lowtide.ops.attention.attention_grouped import grouped_attention
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules, Sight
from lowtide.ops.target import autocast_dtype


class Backend(NamedTuple):
    """A way to compute `varlen_attention`."""

    run: Callable[[Tensor, Tensor, Tensor, AttentionPlan, Rules], Tensor]
    """(query, key, value, plan, rules)"""
    why_not: Callable[[Tensor, Tensor, Tensor, Rules], str | None]
    """What keeps it from serving (query, key, value, rules), None if nothing does."""
    title: str = ""
    """What it is called in a report."""


BACKENDS: dict[str, Backend] = {
    "flash3": Backend(flash3_attention, why_not_flash3, "FlashAttention 3"),
    "flash2": Backend(flash2_attention, why_not_flash2, "FlashAttention 2"),
    "varlen": Backend(torch_varlen_attention, why_not_varlen, "torch.nn.attention.varlen"),
    "flex": Backend(flex_ragged_attention, why_not_flex, "flex attention"),
    "grouped": Backend(
        grouped_attention,
        lambda query, key, value, rules: None,
        "scaled_dot_product_attention on segments of equal length together",
    ),
}
"""By name, the preferred ones first."""

_observed: ContextVar[set[str] | None] = ContextVar("observed", default=None)


@contextlib.contextmanager
def observed_backends() -> Iterator[set[str]]:
    """Collects the names of the backends that serve the calls made while the context lasts."""
    names: set[str] = set()
    token = _observed.set(names)
    try:
        yield names
    finally:
        _observed.reset(token)


class AttentionRules(TypedDict, total=False):
    """What a layer asks of its attention; what is left out has its plain value."""

    scale: float | None
    """Factor of the attention scores; `dim ** -0.5` if None."""
    window: int | None
    """A query sees so many keys, itself included; None for all before it. Likewise on its other side where it is not
    causal."""
    chunk: int | None
    """A query sees only keys in the same stretch of so many positions (Llama 4); None for all."""
    softcap: float | None
    """Scores become `softcap * tanh(scores / softcap)` (Gemma 2)."""
    sinks: Float[Tensor, " heads"] | None
    """A learned score for each head that takes its share of the softmax and gives nothing (gpt-oss)."""
    dropout: float
    """Probability of dropping an attention weight."""
    causal: bool
    """Whether a query sees no key after it; otherwise it sees its whole segment, as in an encoder."""
    bias: Float[Tensor, "heads distances"] | None
    """Added to the scores by the distance from query to key (T5), from -(distances // 2) upwards."""


def varlen_attention(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "keys kv_heads dim"],
    value: Float[Tensor, "keys kv_heads value_dim"],
    plan: AttentionPlan,
    *,
    backend: str | None = None,
    **asked: Unpack[AttentionRules],
) -> Float[Tensor, "tokens heads value_dim"]:
    """Attention within segments and from segments to their prefix; or, across two sequences, to that alone.

    Args:
        plan: of the batch that the tokens belong to.
        backend: one of `BACKENDS`; by default the first that can serve the call.
        asked: see `AttentionRules`.

    Returns:
        What each token gathers, in the order of the tokens.

    Raises:
        ValueError: `backend` cannot serve the call, and why.
    """
    query, key, value = in_autocast(query, key, value)
    rules = rules_of(asked, query.shape[-1], plan.longest)
    name = backend or _choose(query, key, value, rules)
    observed = _observed.get()
    if observed is not None:
        observed.add(name)
    if backend is not None and (reason := BACKENDS[name].why_not(query, key, value, rules)):
        raise ValueError(f"the attention backend {backend!r} {reason}: choose another, or leave the choice open")
    return BACKENDS[name].run(query, key, value, plan, rules)


def _choose(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> str:
    return next(name for name, backend in BACKENDS.items() if not backend.why_not(query, key, value, rules))


class _Asked(NamedTuple):
    """`AttentionRules` with its plain values."""

    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    causal: bool = True
    bias: Tensor | None = None


def in_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in one dtype: a norm with float32 weights leaves queries and keys in float32 under autocast, and values
    in the lower dtype."""
    dtype = autocast_dtype(query.device)
    if dtype is None or query.dtype == torch.float64:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def rules_of(asked: AttentionRules, dim: int, keys: int) -> Rules:
    """What a layer asks for, with plain values for the rest, and without limits that so many keys never reach."""
    known = _Asked(**asked)
    scale = dim**-0.5 if known.scale is None else known.scale
    sight = Sight(known.window, known.chunk).within(keys)
    return Rules(scale, sight, known.softcap, known.sinks, known.dropout, known.causal, known.bias)
