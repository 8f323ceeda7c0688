"""A decoder layer whose first half is given (a recurrence, a short convolution, attention of another form), and whose
second half is a gated MLP, as one autograd function.

The first half is any differentiable function of hidden states: its own backward is called where this one comes to it,
as `decoder_layer` does with attention. What a layer keeps is `decoder_layer`'s too: one that is checkpointed keeps its
input, and computes again all but the last product. What is computed, and what is exact, is `decoder_layer`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.layers.decoder_layer import DecoderLayer, Keeps, Pass
from lowtide.ops.surroundings import Surroundings
from lowtide.ops.target import without_autocast

Mix = Callable[[Tensor], Tensor]
"""The residual after the first half of a layer, of its hidden states; differentiable."""


def mixed_layer(
    layer: DecoderLayer,
    hidden: Float[Tensor, "*rows width"],
    mix: Mix,
    mixed_by: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    keeps: Keeps,
) -> Float[Tensor, "*rows width"]:
    """What a layer makes of hidden states.

    Args:
        layer: the layer, of which the second half is read.
        mix: its first half.
        mixed_by: the parameters of that half that a gradient is wanted of.
        dtype: of the products of the second half.
        keeps: for backward; what the first half keeps, wherever it is not computed again, is its own affair.
    """
    parameters = layer.trained()
    if not torch.is_grad_enabled() or not (hidden.requires_grad or mixed_by or parameters):
        return _second_half(Pass(layer, None, dtype, None), mix(hidden))[0]
    return _MixedLayer.apply(_How(layer, mix, mixed_by, dtype, keeps), hidden, *mixed_by, *parameters)


class _How(NamedTuple):
    """How hidden states go through a layer."""

    layer: DecoderLayer
    mix: Mix
    mixed_by: Sequence[Tensor]
    dtype: torch.dtype
    keeps: Keeps


class _Mixed(NamedTuple):
    """The first half, with a graph where its gradient is to come."""

    hidden: Tensor
    graph: Tensor

    @property
    def out(self) -> Tensor:
        """What it gives, without a graph."""
        return self.graph.detach()

    def gradients(self, slopes: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those at hidden states and at parameters, of that at what it gives."""
        return [*torch.autograd.grad(self.graph, [self.hidden, *parameters], slopes, allow_unused=True)]


def _mixed(how: _How, hidden: Tensor, *, graph: bool) -> _Mixed:
    with torch.enable_grad() if graph else contextlib.nullcontext():
        leaf = hidden.detach().requires_grad_(graph)
        return _Mixed(leaf, how.mix(leaf))


def _second_half(work: Pass, mid: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The layer's output, and what its backward would have to compute again."""
    rows = mid.reshape(-1, mid.shape[-1])
    with without_autocast(mid.device):
        gate, up = work.gated(rows)
        out, given = work.last(rows, work.inner(gate, up))
    return out.view(mid.shape), [gate, up, given]


class _MixedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _How, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.how, ctx.parameters, ctx.mixed = how, parameters[len(how.mixed_by) :], None
        again = how.keeps == "input"
        ctx.surroundings = Surroundings(hidden, how.layer.random)
        mixed = _mixed(how, hidden, graph=not again)
        if not again:  # only what comes after it draws its random numbers again
            ctx.mixed, ctx.surroundings = mixed, Surroundings(hidden, how.layer.random)
        out, kept = _second_half(Pass(how.layer, None, how.dtype, None), mixed.out)
        ctx.save_for_backward(hidden if again else None, *(kept if how.keeps == "products" else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *kept = ctx.saved_tensors
        how, (grad,) = ctx.how, grads
        with ctx.surroundings.restored():
            mixed, ctx.mixed = ctx.mixed or _mixed(how, hidden, graph=True), None
            mid = mixed.out.reshape(-1, grad.shape[-1])
            work = Pass(how.layer, None, how.dtype, None, back=True)
            gated, given = ((kept[0], kept[1]), kept[2]) if kept else (None, None)
            del kept
            with without_autocast(grad.device):
                slopes = work.mlp_backward(grad.reshape(mid.shape), mid, gated, given)
            del mid, gated, given
        with without_autocast(grad.device):  # as in a backward
            of_hidden, *found = mixed.gradients(slopes.view(grad.shape), how.mixed_by)
        return None, of_hidden if ctx.needs_input_grad[1] else None, *found, *work.gradients(ctx.parameters)
