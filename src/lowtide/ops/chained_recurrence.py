"""Recurrences over a piece of a long row, which start from the states that the piece before left
(`ops.attention.piece_keys`).

A state is all that a piece needs of those before it. In backward its gradient is left with the piece before, as those
of keys are, and is taken in where that piece's own final states have gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.piece_keys import PieceKeys
from lowtide.ops.recurrence import Recurrence, RecurrenceLayout


def chained_recurrence(layer: Hashable, recurrence: Recurrence, plan: AttentionPlan, chunk: int) -> Tensor:
    """A recurrence over the segments of a plan, which may be those of a piece.

    Args:
        layer: tells the recurrences of a model apart.
        chunk: tokens of a chunk.
    """
    piece, initial = plan.piece, None
    layout = RecurrenceLayout.of(plan, chunk)
    if piece is None:
        return recurrence.over(layout)[0]
    if piece.before is not None:
        state = _Before.apply(recurrence.like, layer, piece.before)
        initial = state.expand(len(plan.segments), *[-1] * (state.ndim - 1))
    out, states = recurrence.over(layout, initial, final=piece.keeps)
    if states is None:
        return out
    if piece.records:
        piece.keep(layer, [states])
    return _HandedOn.apply(out, states, layer, piece)


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
