"""Recurrences and short convolutions over a piece of a long row, which go on from what the piece before left
(`ops.attention.piece_keys`): its states, and its last inputs.

A state is all that a piece needs of those before it. In backward its gradient is left with the piece before, as those
of keys are, and is taken in where that piece's own final states have gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan, Sight
from lowtide.ops.attention.chained_attention import joined
from lowtide.ops.attention.piece_keys import PieceKeys
from lowtide.ops.recurrence.convolution import causal_convolution
from lowtide.ops.recurrence.recurrence import Recurrence


def chained_recurrence(layer: Hashable, recurrence: Recurrence, plan: AttentionPlan, chunk: int) -> Tensor:
    """A recurrence over the segments of a plan, which may be those of a piece.

    Args:
        layer: tells the recurrences of a model apart.
        chunk: tokens of a chunk.
    """
    piece, initial = plan.piece, None
    if piece is None:
        return recurrence.over(plan, chunk)[0]
    if piece.before is not None:
        state = _Before.apply(recurrence.like, layer, piece.before)
        initial = state.expand(len(plan.segments), *[-1] * (state.ndim - 1))
    out, states = recurrence.over(plan, chunk, initial, final=piece.keeps)
    if states is None:
        return out
    if piece.records:
        piece.keep(layer, [states])
    return _HandedOn.apply(out, states, layer, piece)


def chained_convolution(
    layer: Hashable, x: Float[Tensor, "tokens channels"], weight: Float[Tensor, "channels taps"], plan: AttentionPlan
) -> Float[Tensor, "tokens channels"]:
    """A short convolution over the segments of a plan, which may be those of a piece.

    Args:
        layer: tells the convolutions of a model apart.
        weight: the last tap is the token's own.
    """
    if plan.piece is not None:
        (x,), plan = joined(layer, (x,), plan, Sight(window=weight.shape[1]))
    return causal_convolution(x, weight, plan)


class _Before(torch.autograd.Function):
    """The states that a piece kept, [1, ...]; their gradient is left there."""

    @staticmethod
    def forward(ctx: Any, follower: Tensor, layer: Hashable, piece: PieceKeys) -> Tensor:
        """`follower` is of the piece that goes on: what depends on it has a gradient."""
        ctx.layer, ctx.piece = layer, piece
        return piece.read(layer)[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.piece.leave(ctx.layer, grads)
        return None, None, None


class _HandedOn(torch.autograd.Function):
    """The outputs as they are; the gradient of the states is what later pieces left."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, states: Tensor, layer: Hashable, piece: PieceKeys) -> Tensor:
        ctx.layer, ctx.piece, ctx.dtype = layer, piece, states.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        left = ctx.piece.take(ctx.layer)
        return grads[0], None if left is None else left[0].to(ctx.dtype), None, None
