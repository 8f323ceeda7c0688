"""Rows in groups times the matrix of their group and its low-rank adapter, on a CPU.

`x W + (x F) S` for the rows of each group. As products apart, what the adapter adds would be a tensor of the size of
the output, in forward and once more in backward, and a CPU takes longer to make and add these than to multiply. Here
each group's is added by the product itself while its rows are in the cache, and the gradients of the adapter are
multiplied the way round that has long rows. The two operations are custom ones of torch, which
it traces and keeps as it does its own, so that a plan needs no sizes of groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, library
from torch.autograd.function import once_differentiable


def adapted_groups(
    x: Float[Tensor, "rows width"],
    stack: Float[Tensor, "groups width columns"],
    first: Float[Tensor, "groups width rank"],
    second: Float[Tensor, "groups rank columns"],
    ends: Int[Tensor, " groups"],
) -> Float[Tensor, "rows columns"]:
    """Rows behind the last group are not computed.

    Args:
        x: sorted by group.
        stack: gets no gradient.
        ends: where the rows of each group end.
    """
    return _AdaptedGroups.apply(x, stack, first, second, ends)


class _AdaptedGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Tensor, first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
        out, low = _forward(x, stack, first, second, ends)
        ctx.save_for_backward(x, low, stack, first, second, ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_first, of_second = _backward(grads[0], *ctx.saved_tensors)
        return of_x, None, of_first.mT, of_second, None


@library.custom_op("lowtide::adapted_groups", mutates_args=())
def _forward(x: Tensor, stack: Tensor, first: Tensor, second: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """What comes of the rows, and [rows, rank] what comes of them by the first factor."""
    out, low = _results(x, stack, first)
    for group, rows in _groups(ends):
        torch.mm(x[rows], first[group], out=low[rows])
        torch.mm(x[rows], stack[group], out=out[rows])
        out[rows].addmm_(low[rows], second[group])
    return out, low


@_forward.register_fake
def _results(x: Tensor, stack: Tensor, first: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], stack.shape[2]), x.new_empty(x.shape[0], first.shape[2])


@library.custom_op("lowtide::adapted_groups_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, low: Tensor, stack: Tensor, first: Tensor, second: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x`, of `first` as [groups, rank, width], and of `second`."""
    of_x, of_first, of_second = _gradients(grad, x, low, stack, first, second, ends)
    of_first.zero_()
    of_second.zero_()
    for group, rows in _groups(ends):
        of_low = grad[rows] @ second[group].mT
        torch.mm(grad[rows], stack[group].mT, out=of_x[rows])
        of_x[rows].addmm_(of_low, first[group].mT)
        torch.mm(of_low.mT, x[rows], out=of_first[group])
        torch.mm(low[rows].mT, grad[rows], out=of_second[group])
    return of_x, of_first, of_second


@_backward.register_fake
def _gradients(
    grad: Tensor, x: Tensor, low: Tensor, stack: Tensor, first: Tensor, second: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    groups, width, rank = first.shape
    return torch.empty_like(x), first.new_empty(groups, rank, width), second.new_empty(second.shape)


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The groups that have rows."""
    for group, (start, stop) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if stop > start:
            yield group, slice(start, stop)


FORWARD: Any = torch.ops.lowtide.adapted_groups
BACKWARD: Any = torch.ops.lowtide.adapted_groups_backward
"""The operations, by which plans count them."""
