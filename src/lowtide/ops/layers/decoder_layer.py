"""A decoder layer of Llama's form as one autograd function, which computes again by itself what it does not keep.

Of a layer as transformers and PEFT have it, a device spends a third of its time between the products: casts, scales and
sums of adapters, norms in pieces, rotary embeddings in slices. Here the layer's forward and backward are written out,
with adapters' products in the epilogue of the large ones (`lora_linear`) and one kernel for each norm, rotation and
gate (`layer_kernels`). Residuals are added in the epilogue of a product, too. Attention is a function that is given,
differentiable: its own backward is called where this one comes to it, whatever its kernel.

A layer that is checkpointed keeps its input alone. Its backward computes again all but the last product, which nothing
needs. A layer that is not keeps its input, attention's tensors, the residual between its halves and the two inputs of
the gate; norms and the gate are computed again, products are not.

Exact to rounding: where transformers rounds to 16 bits between two operations, this one may round once.

Shapes: tokens are those of all segments, end to end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.layers.layer_kernels import Norm, rms_norm, rms_norm_backward, rotate_, swiglu, swiglu_backward_
from lowtide.ops.layers.lora_linear import Projection, Projections
from lowtide.ops.surroundings import Surroundings

Rotary = tuple[Float[Tensor, "tokens dim"], Float[Tensor, "tokens dim"]]
"""Cosines and sines."""


@dataclass(frozen=True)
class DecoderLayer:
    """What a layer is made of."""

    norms: tuple[Norm, Norm]
    """Before attention, and before the MLP."""
    attention: tuple[Projection, Projection, Projection]
    """To queries, keys and values."""
    output: Projection
    """Of what attention gathers."""
    gates: tuple[Projection, Projection]
    """Gate and up."""
    down: Projection
    dim: int
    """Width of a head."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Attention of queries, keys and values [tokens, heads, dim], differentiable; gives [tokens, heads x dim]."""
    head_norms: tuple[Norm, Norm] | None = None
    """Of each head of queries, and of keys."""
    factor: float = 1.0
    """By which each half is multiplied before it is added."""
    random: bool = False
    """Whether something in it draws random numbers."""

    def trained(self) -> list[Tensor]:
        """The parameters that a gradient is wanted of."""
        found = [each for part in (*self.attention, self.output, *self.gates, self.down) for each in part.trained()]
        norms = (*self.norms, *(self.head_norms or ()))
        return found + [norm.weight for norm in norms if norm.weight.requires_grad]


def decoder_layer(
    layer: DecoderLayer,
    hidden: Float[Tensor, "*rows width"],
    rotary: Rotary | None,
    dtype: torch.dtype,
    *,
    recompute: bool,
) -> Float[Tensor, "*rows width"]:
    """What a layer makes of hidden states.

    Args:
        layer: the layer.
        rotary: of all tokens; None for a layer without rotary embeddings.
        dtype: of its products.
        recompute: whether it keeps its input alone for backward.
    """
    parameters = layer.trained()
    if not torch.is_grad_enabled() or not (hidden.requires_grad or parameters):
        x = hidden.reshape(-1, hidden.shape[-1])
        return _Pass(layer, dtype, rotary).forward(x).view(hidden.shape)
    cos, sin = rotary or (None, None)
    return _Layer.apply(layer, dtype, recompute, hidden, cos, sin, *parameters)


class _Attended(NamedTuple):
    """Attention, with a graph where its gradient is to come."""

    query: Float[Tensor, "tokens heads dim"]
    key: Float[Tensor, "tokens kv_heads dim"]
    value: Float[Tensor, "tokens kv_heads dim"]
    out: Float[Tensor, "tokens gathered"]


class _Raw(NamedTuple):
    """Queries and keys before the norms of heads."""

    query: Float[Tensor, "tokens heads dim"]
    key: Float[Tensor, "tokens kv_heads dim"]


class _Pass:
    """One pass through a layer, forward or backward, with what it has computed so far.

    Args:
        layer: the layer.
        dtype: of the products.
        rotary: cosines and sines.
        back: whether it goes backward.
    """

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype, rotary: Rotary | None, *, back: bool = False) -> None:
        self.layer, self.dtype, self.rotary = layer, dtype, rotary
        make = partial(Projections, dtype=dtype, again=back)
        self.attention, self.output = make(layer.attention), make([layer.output])
        self.gates, self.down = make(layer.gates), make([layer.down])
        self.found: dict[int, Tensor] = {}
        """By the `id` of a norm's weight, its gradient."""

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, of which nothing is kept."""
        mid = self.attended_residual(x)
        return self.last(mid, swiglu(*self.gated(mid)))

    def attended_residual(self, x: Tensor) -> Tensor:
        """The residual after attention."""
        heads, _ = self.heads(rms_norm(x, self.layer.norms[0], self.dtype)[0])
        return self.residual(x, self.attend(*heads, graph=False).out)

    def heads(self, normed: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], _Raw | None]:
        """Queries, keys and values of a normed input, as attention takes them, and as the norms of heads do."""
        layer, dim = self.layer, self.layer.dim
        self.attention.reduce(normed)
        query, key, value = (self.attention.product(normed, each).view(len(normed), -1, dim) for each in range(3))
        raw = None
        if layer.head_norms is not None:
            raw = _Raw(query, key)
            query, key = (
                rms_norm(each.view(-1, dim), norm, self.dtype)[0].view(each.shape)
                for each, norm in zip(raw, layer.head_norms, strict=True)
            )
        if self.rotary is not None:
            rotate_(query, key, *self.rotary)
        return (query, key, value), raw

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, graph: bool) -> _Attended:
        """Attention, with a graph or without one."""
        with torch.enable_grad() if graph else contextlib.nullcontext():
            leaves = [each.detach().requires_grad_(graph) for each in (query, key, value)]
            return _Attended(leaves[0], leaves[1], leaves[2], self.layer.attend(*leaves))

    def residual(self, x: Tensor, gathered: Tensor) -> Tensor:
        """The residual after attention, of what it gathered."""
        self.output.reduce(gathered)
        return self._onto(x, self.output, gathered)

    def gated(self, mid: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up, of the residual after attention."""
        normed, _ = rms_norm(mid, self.layer.norms[1], self.dtype)
        self.gates.reduce(normed)
        gate, up = (self.gates.product(normed, each) for each in range(2))
        return gate, up

    def last(self, mid: Tensor, inner: Tensor) -> Tensor:
        """The layer's output, of what its gate gives."""
        self.down.reduce(inner)
        return self._onto(mid, self.down, inner)

    def _onto(self, residual: Tensor, part: Projections, x: Tensor) -> Tensor:
        if residual.dtype == self.dtype:
            return part.product(x, 0, onto=residual, factor=self.layer.factor)
        return torch.add(residual, part.product(x, 0), alpha=self.layer.factor)

    # -- backward -------------------------------------------------------------------------------------------------

    def mlp_backward(self, grad: Tensor, mid: Tensor, gated: tuple[Tensor, Tensor] | None) -> Tensor:
        """The gradient at the residual after attention, of that at the layer's output.

        Args:
            gated: what `gated` gave in forward, which is written over; None: it is computed again.
        """
        norm = self.layer.norms[1]
        normed, scale = rms_norm(mid, norm, self.dtype)
        self.gates.reduce(normed)
        gate, up = gated or (self.gates.product(normed, each) for each in range(2))
        outer = self._scaled(grad)
        if self.down.drops:
            self.down.reduce(swiglu(gate, up))
        inner = self.down.input_gradient([outer])
        swiglu_backward_(inner, gate, up)
        if not self.down.drops:
            self.down.reduce(inner)
        self.down.weight_gradients(inner, [outer])
        del inner, outer
        slopes = self.gates.input_gradient([gate, up])
        self.gates.weight_gradients(normed, [gate, up])
        del gate, up, gated, normed
        found, of_norm = rms_norm_backward(slopes, mid, scale, norm, add=grad)
        self._keep(norm, of_norm)
        return found

    def attention_backward(
        self,
        grad: Tensor,
        x: Tensor,
        normed: tuple[Tensor, Tensor],
        attended: _Attended,
        raw: _Raw | None,
        on: bool,
    ) -> Tensor | None:
        """The gradient at the layer's input, of that at the residual after attention; None unless it goes on.

        Args:
            normed: the input, normed, and its scale.
            attended: with its graph.
            raw: queries and keys before the norms of heads.
            on: whether the gradient at the input, or at the norm's weight, is wanted.
        """
        layer, norm = self.layer, self.layer.norms[0]
        outer, gathered = self._scaled(grad), attended.out.detach()
        slopes = self.output.input_gradient([outer])
        self.output.weight_gradients(gathered, [outer])
        del outer, gathered
        found = torch.autograd.grad(attended.out, attended[:3], slopes)
        del slopes
        query, key, value = (each.to(self.dtype).contiguous() for each in found)
        del found
        if self.rotary is not None:
            rotate_(query, key, *self.rotary, back=True)
        if raw is not None and layer.head_norms is not None:
            query, key = (
                self._head_norm_backward(*each) for each in zip((query, key), raw, layer.head_norms, strict=True)
            )
        grads = [each.view(len(each), -1) for each in (query, key, value)]
        self.attention.weight_gradients(normed[0], grads)
        if not on:
            return None
        slopes = self.attention.input_gradient(grads)
        del query, key, value, grads
        out, of_norm = rms_norm_backward(slopes, x, normed[1], norm, add=grad)
        self._keep(norm, of_norm)
        return out

    def _head_norm_backward(self, grad: Tensor, raw: Tensor, norm: Norm) -> Tensor:
        rows = raw.view(-1, raw.shape[-1])
        scale = rms_norm(rows, norm, self.dtype)[1]
        found, of_norm = rms_norm_backward(grad.view(rows.shape), rows, scale, norm)
        self._keep(norm, of_norm)
        return found.view(raw.shape)

    def _scaled(self, grad: Tensor) -> Tensor:
        """A gradient at a residual, as one at what was added to it."""
        outer = grad.to(self.dtype)
        return outer if self.layer.factor == 1 else outer * self.layer.factor

    def _keep(self, norm: Norm, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.found[id(norm.weight)] = gradient

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """What was found of a parameter."""
        places = (self.found, *(each.found for each in (self.attention, self.output, self.gates, self.down)))
        return next((found[id(parameter)] for found in places if id(parameter) in found), None)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: DecoderLayer,
        dtype: torch.dtype,
        recompute: bool,
        hidden: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.dtype, ctx.parameters = layer, dtype, parameters
        ctx.surroundings = Surroundings(hidden, layer.random)
        x = hidden.reshape(-1, hidden.shape[-1])
        work = _Pass(layer, dtype, None if cos is None or sin is None else (cos, sin))
        ctx.attended, kept = None, []
        if recompute:
            out = work.forward(x)
        else:
            heads, raw = work.heads(rms_norm(x, layer.norms[0], dtype)[0])
            ctx.attended = work.attend(*heads, graph=True)
            mid = work.residual(x, ctx.attended.out.detach())
            gate, up = work.gated(mid)
            out, kept = work.last(mid, swiglu(gate, up)), [mid, gate, up, *(raw or ())]
        ctx.save_for_backward(x, cos, sin, *kept)
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, *kept = ctx.saved_tensors
        layer, shape = ctx.layer, grads[0].shape
        grad = grads[0].reshape(x.shape)
        goes_on = ctx.needs_input_grad[3] or layer.norms[0].weight.requires_grad
        with ctx.surroundings.restored():
            work = _Pass(layer, ctx.dtype, None if cos is None else (cos, sin), back=True)
            normed = rms_norm(x, layer.norms[0], ctx.dtype)
            if kept:
                mid, gate, up, *both = kept
                attended, raw, gated = ctx.attended, _Raw(*both) if both else None, (gate, up)
                ctx.attended = None
                work.attention.reduce(normed[0])
                work.output.reduce(attended.out.detach())
                del gate, up
            else:
                heads, raw = work.heads(normed[0])
                attended, gated = work.attend(*heads, graph=True), None
                mid = work.residual(x, attended.out.detach())
                del heads
            del kept
            between = work.mlp_backward(grad, mid, gated)
            del mid, grad
            found = work.attention_backward(between, x, normed, attended, raw, goes_on)
        of_hidden = found.view(shape) if found is not None and ctx.needs_input_grad[3] else None
        gradients = (work.gradient_of(each) for each in ctx.parameters)
        return None, None, None, of_hidden, None, None, *gradients
