"""The attention of a piece of a long row: to its own keys, and to those that earlier pieces kept
(`ops.attention.piece_keys`).

Without limits to what a query sees, each earlier piece is a block of keys that is seen whole
(`ops.attention.attention_blocks`). A layer with a sliding window, or that attends within stretches, sees the last
tokens before the piece alone: these are put beside the piece's own keys, as a prefix of each segment, under the usual
masks. A short convolution reads the last tokens before the piece in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.ops.attention.attention_blocks import Merged, Part, block_kernel, in_blocks
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules, Sight
from lowtide.ops.attention.piece_keys import PieceKeys
from lowtide.ops.attention.varlen_attention import AttentionRules, in_autocast, rules_of, varlen_attention


def chained_attention(
    layer: Hashable,
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens kv_heads dim"],
    value: Float[Tensor, "tokens kv_heads value_dim"],
    plan: AttentionPlan,
    **asked: Unpack[AttentionRules],
) -> Float[Tensor, "tokens heads value_dim"]:
    """What each token of a piece gathers from the tokens before it in the row, those of earlier pieces too.

    Args:
        layer: tells the layers of a model apart.
        plan: of a piece.
        asked: what the layer asks for.

    Raises:
        ValueError: the layer asks for what cannot be computed piece by piece; names it, and what to do.
    """
    piece = plan.piece
    assert piece is not None
    query, key, value = in_autocast(query, key, value)
    rules = rules_of(asked, query.shape[-1], piece.row_tokens)
    if reason := why_not_chained(rules):
        raise ValueError(f"a row above tokens_per_microbatch is run in pieces, and {reason}")
    if rules.sight != Sight():
        (key, value), plan = joined(layer, (key, value), plan, rules.sight)
        return varlen_attention(query, key, value, plan, **asked)
    key, value = carried(layer, (key, value), piece, piece.tokens)
    if piece.before is None:
        return varlen_attention(query, key, value, plan, **asked)
    return _Chained.apply(query, key, value, rules.sinks, layer, plan, rules._replace(sinks=None))


def why_not_chained(rules: Rules) -> str | None:
    """What keeps attention from being computed piece by piece, as a clause with what to do; None if nothing does."""
    raise_cap = "or raise `tokens_per_microbatch` to the longest row"
    if rules.dropout > 0:
        return f"attention dropout ({rules.dropout:g}) would be drawn anew: set attention_dropout=0, {raise_cap}"
    if not rules.causal:
        return f"this model's tokens also see those after them: lower `max_length`, {raise_cap}"
    if rules.bias is not None:
        return f"this model's attention has biases by distance: lower `max_length`, {raise_cap}"
    return None


def joined(
    layer: Hashable, own: Sequence[Tensor], plan: AttentionPlan, sight: Sight
) -> tuple[Sequence[Tensor], AttentionPlan]:
    """Tensors [tokens, ...] of a layer with those of the last tokens before the piece that are in sight, and the plan
    that has them as a prefix of each segment.

    Args:
        sight: what the piece's tokens see of those before.
    """
    piece = plan.piece
    assert piece is not None
    own = carried(layer, own, piece, _reach(piece.start + piece.tokens, sight))
    count = _reach(piece.start, sight)
    return (own, plan) if count == 0 else (_Joined.apply(layer, piece, count, *own), plan.behind(count))


def _reach(start: int, sight: Sight) -> int:
    """How many of the tokens before a place are seen from there."""
    reach = start if sight.window is None else min(start, sight.window - 1)
    return reach if sight.chunk is None else min(reach, start % sight.chunk)


def carried(layer: Hashable, own: Sequence[Tensor], piece: PieceKeys, last: int) -> Sequence[Tensor]:
    """Tensors [tokens, ...] of a layer, of whose last tokens later pieces leave gradients; the pass before keeps them.

    Layers that share keys keep them once, by the first.
    """
    if not piece.keeps or piece.is_shared(layer):
        return own
    if piece.records:
        piece.keep(layer, [each[max(each.shape[0] - last, 0) :] for each in own])
    return _Carried.apply(layer, piece, *own) if torch.is_grad_enabled() else own


class _Carried(torch.autograd.Function):
    """The same tensors, whose gradients take in what later pieces left."""

    @staticmethod
    def forward(ctx: Any, layer: Hashable, piece: PieceKeys, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.piece = layer, piece
        return tuple(each.view_as(each) for each in own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        left = ctx.piece.take(ctx.layer)
        if left is not None:
            grads = tuple(_sum_of_last(each, more) for each, more in zip(grads, left, strict=True))
        return (None, None, *grads)


def _sum_of_last(own: Tensor, more: Tensor) -> Tensor:
    """A gradient with more of the last tokens, rounded once."""
    missing = own.shape[0] - more.shape[0]
    if missing == 0:
        return more.add_(own).to(own.dtype)
    return torch.cat([own[:missing], more.add_(own[missing:]).to(own.dtype)])


class _Joined(torch.autograd.Function):
    """Tensors of the piece's own tokens, then of the last ones before it."""

    @staticmethod
    def forward(ctx: Any, layer: Hashable, piece: PieceKeys, count: int, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.piece, ctx.tokens = layer, piece, own[0].shape[0]
        last = piece.last(layer, count)
        return tuple(torch.cat(each) for each in zip(own, last, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.piece.leave_last(ctx.layer, [each[ctx.tokens :] for each in grads])
        return (None, None, None, *(each[: ctx.tokens] for each in grads))


class _Chained(torch.autograd.Function):
    """Attention to the piece's own tokens and to all of those before it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: Hashable,
        plan: AttentionPlan,
        rules: Rules,
    ) -> Tensor:
        kernel, piece = block_kernel(query, value, rules), plan.piece
        assert piece is not None
        with in_blocks(), torch.autocast(query.device.type, enabled=False):
            spans = [slice(part.start, part.stop) for part in plan.segments]
            parts = [kernel.forward(query[own], key[own], value[own], rules, causal=True) for own in spans]
            merged = Merged(parts[0] if len(parts) == 1 else Part(*map(torch.cat, zip(*parts, strict=True))))
            for earlier in piece.ancestors():
                key_before, value_before = earlier.read(layer)
                merged.add(kernel.forward(query, key_before, value_before, rules, causal=False))
            if sinks is not None:
                merged.add_sinks(sinks)
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.lse, sinks)
        ctx.layer, ctx.plan, ctx.rules = layer, plan, rules
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        query, key, value, out, lse, sinks = ctx.saved_tensors
        kernel, merged, rules = block_kernel(query, value, ctx.rules), Part(out, lse), ctx.rules
        own = [slice(part.start, part.stop) for part in ctx.plan.segments]
        found = [
            kernel.backward(grad[s], query[s], key[s], value[s], Part(out[s], lse[s]), rules, causal=True) for s in own
        ]
        of_query, of_key, of_value = (
            each[0] if len(each) == 1 else torch.cat(each) for each in zip(*found, strict=True)
        )
        of_query = of_query.to(lse.dtype)
        for earlier in ctx.plan.piece.ancestors():
            key_before, value_before = earlier.read(ctx.layer)
            more, *left = kernel.backward(grad, query, key_before, value_before, merged, rules, causal=False)
            of_query += more
            earlier.leave(ctx.layer, left)
        of_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype) - lse)
            of_sinks = -(share * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0).to(sinks.dtype)
        given = (of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype))
        return (*given, of_sinks, None, None, None)
