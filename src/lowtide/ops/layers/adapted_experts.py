"""Tokens times the matrices of their experts and the low-rank adapters of these, on a CPU.

Each expert's tokens are some rows of all, and `x W + (x F) S` is computed for one expert after the other. As operations
apart, the chosen rows, what the adapters add and each expert's share of the outputs would be tensors of all pairs of a
token and an expert, in forward and once more in backward, and a CPU takes longer to make and add these than to
multiply. Here rows are taken, multiplied, added to and summed while they are in the cache. The two operations are
custom ones of torch, which it traces and keeps as it does its own, so that a plan needs no sizes of groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from lowtide.ops.target import without_autocast


class Pairs(NamedTuple):
    """Tokens and experts that see them, sorted by expert."""

    tokens: Int[Tensor, " pairs"]
    ends: Int[Tensor, " experts"]
    """Where the pairs of each expert end."""


class AdaptedStack(NamedTuple):
    """Frozen matrices of experts, and the factors of what is added to each; of rank 0 where nothing is."""

    weight: Float[Tensor, "experts width columns"]
    first: Float[Tensor, "experts width rank"]
    second: Float[Tensor, "experts rank columns"]


def taken_by_experts(
    x: Float[Tensor, "tokens width"], stack: AdaptedStack, pairs: Pairs
) -> Float[Tensor, "pairs columns"]:
    """What the expert of each pair makes of its token."""
    return _Products.apply(x, None, *stack, *pairs)


def summed_over_experts(
    x: Float[Tensor, "pairs width"], stack: AdaptedStack, pairs: Pairs, count: int
) -> Float[Tensor, "tokens columns"]:
    """The sums over each of `count` tokens' experts of what these make of the pair's row; at least in float32."""
    return _Products.apply(x, count, *stack, *pairs)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int | None, *given: Tensor) -> Tensor:
        with without_autocast(x.device):
            out, low = _forward(x, given[:3], given[3:], count)
        ctx.save_for_backward(x, low, *given)
        ctx.summed = count is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, *given = ctx.saved_tensors
        with without_autocast(x.device):
            of_x, of_first, of_second = _backward(grads[0].to(x.dtype), x, low, given[:3], given[3:], ctx.summed)
        return of_x.to(x.dtype), None, None, of_first.mT, of_second, None, None


@library.custom_op("lowtide::adapted_experts", mutates_args=())
def _forward(x: Tensor, stack: Sequence[Tensor], pairs: Sequence[Tensor], count: int | None) -> tuple[Tensor, Tensor]:
    """What comes of the rows, and [pairs, rank] what comes of them by the first factor."""
    (weight, first, second), (tokens, ends) = stack, pairs
    out, low = _results(x, stack, pairs, count)
    if count is not None:
        out.zero_()
    for expert, rows in _groups(ends):
        mine = x[rows] if count is not None else x.index_select(0, tokens[rows])
        torch.mm(mine, first[expert], out=low[rows])
        if count is None:
            torch.mm(mine, weight[expert], out=out[rows])
            out[rows].addmm_(low[rows], second[expert])
        else:
            made = torch.mm(mine, weight[expert]).addmm_(low[rows], second[expert])
            out.index_add_(0, tokens[rows], made.to(out.dtype))
    return out, low


@_forward.register_fake
def _results(x: Tensor, stack: Sequence[Tensor], pairs: Sequence[Tensor], count: int | None) -> tuple[Tensor, Tensor]:
    rows, (_, rank, columns) = pairs[0].shape[0], stack[2].shape
    out = x.new_empty(rows, columns) if count is None else x.new_empty(count, columns, dtype=_wide(x))
    return out, x.new_empty(rows, rank)


@library.custom_op("lowtide::adapted_experts_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, low: Tensor, stack: Sequence[Tensor], pairs: Sequence[Tensor], summed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x`, of `first` as [experts, rank, width], and of `second`."""
    (weight, first, second), (tokens, ends) = stack, pairs
    of_x, of_first, of_second = _gradients(grad, x, low, stack, pairs, summed)
    of_first.zero_()
    of_second.zero_()
    if not summed:
        of_x.zero_()
    for expert, rows in _groups(ends):
        mine = x[rows] if summed else x.index_select(0, tokens[rows])
        slope = grad.index_select(0, tokens[rows]) if summed else grad[rows]
        of_low = slope @ second[expert].mT
        if summed:
            torch.mm(slope, weight[expert].mT, out=of_x[rows])
            of_x[rows].addmm_(of_low, first[expert].mT)
        else:
            made = torch.mm(slope, weight[expert].mT).addmm_(of_low, first[expert].mT)
            of_x.index_add_(0, tokens[rows], made.to(of_x.dtype))
        torch.mm(of_low.mT, mine, out=of_first[expert])
        torch.mm(low[rows].mT, slope, out=of_second[expert])
    return of_x, of_first, of_second


@_backward.register_fake
def _gradients(
    grad: Tensor, x: Tensor, low: Tensor, stack: Sequence[Tensor], pairs: Sequence[Tensor], summed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (experts, width, rank), second = stack[1].shape, stack[2]
    of_x = x.new_empty(x.shape, dtype=x.dtype if summed else _wide(x))
    return of_x, second.new_empty(experts, rank, width), second.new_empty(second.shape)


def _wide(x: Tensor) -> torch.dtype:
    """That of sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that see tokens, and their pairs."""
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if stop > start:
            yield expert, slice(start, stop)


FORWARD: Any = torch.ops.lowtide.adapted_experts
BACKWARD: Any = torch.ops.lowtide.adapted_experts_backward
"""The operations, by which plans count them."""
