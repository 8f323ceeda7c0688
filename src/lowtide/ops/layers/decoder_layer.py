"""A decoder layer of Llama's, Gemma's or OLMo's form as one autograd function, which recomputes what it does not keep.

Of a layer as transformers and PEFT have it, a device spends a third of its time between the products: casts, scales and
sums of adapters, norms in pieces, rotary embeddings in slices. Here the layer's forward and backward are written out,
with adapters' products in the epilogue of the large ones (`lora_linear`) and one kernel for each norm, rotation and
gate (`layer_kernels`). Residuals are added in the epilogue of a product, too. Attention is a function that is given,
differentiable: its own backward is called where this one comes to it, whatever its kernel.

A layer that is checkpointed keeps its input alone. Its backward computes again all but the last product, which nothing
needs unless it is normed. It may keep what attention gives as well, which does not run again then (`heads_again`). A
layer that is not checkpointed keeps its input, attention's tensors, the residual between its halves, the two inputs of
the gate and what is normed before it is added; norms and the gate are computed again, products are not.

Exact to rounding: where transformers rounds to 16 bits between two operations, this one may round once.

Shapes: tokens are those of all segments, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.layers.heads_again import HeadsAgain
from lowtide.ops.layers.layer_kernels import (
    Activation,
    Norm,
    gate_backward_,
    gate_product,
    rms_norm,
    rms_norm_backward,
    rotate_,
)
from lowtide.ops.layers.lora_linear import Projections, Together
from lowtide.ops.surroundings import Surroundings
from lowtide.ops.target import without_autocast

Rotary = tuple[Float[Tensor, "tokens dim"], Float[Tensor, "tokens dim"]]
"""Cosines and sines."""
Attend = Callable[..., Tensor]
"""Attention of queries, keys and values [tokens, heads, dim], and of a gate like the queries where the layer has one,
differentiable; gives [tokens, heads x dim]."""
Heads = tuple[Tensor, ...]
"""What attention takes."""
Keeps = Literal["input", "attention", "products"]
"""What a layer keeps for its backward: its input alone, what attention gives as well, or results of products as well,
of which none is computed again."""


@dataclass(frozen=True)
class DecoderLayer:
    """What a layer is made of."""

    norms: tuple[Norm | None, Norm | None]
    """Before attention, and before the MLP; None: the residual goes in as it is."""
    attention: Together
    """To queries, keys and values; of a layer whose first half is given (`mixed_layer`) none."""
    output: Together
    """Of what attention gathers."""
    gates: Together
    """Gate and up, or both by one matrix; of a layer whose MLP is not known (`attention_half`) none."""
    down: Together
    dim: int = 0
    """Width of a head."""
    gated: bool = False
    """Whether beside the queries there is a gate on what attention gathers, by the same matrix, head by head."""
    after: tuple[Norm | None, Norm | None] = (None, None)
    """Of what attention gives, and of what the MLP gives, before it is added; None: it is added as it is."""
    head_norms: tuple[Norm, Norm] | None = None
    """Of queries, and of keys: of each head, or of all heads together, as wide as their weights are."""
    activation: Activation = "silu"
    up_first: bool = False
    """Whether up comes before the gate, as dropout draws for them."""
    gate_factor: float = 1.0
    """By which the gate is multiplied before its activation."""
    factors: tuple[float, float] = (1.0, 1.0)
    """By which each half is multiplied before it is added."""
    random: bool = False
    """Whether something in it draws random numbers."""

    def trained(self) -> list[Tensor]:
        """The parameters that a gradient is wanted of, but for those of a first half that is given."""
        found = [each for part in (self.attention, self.output, self.gates, self.down) for each in part.trained()]
        known = slice(0 if self.attention.parts else 1, None)
        norms = (*self.norms[known], *self.after[known], *(self.head_norms or ()))
        return found + [norm.weight for norm in norms if norm is not None and norm.weight.requires_grad]


def decoder_layer(
    layer: DecoderLayer,
    hidden: Float[Tensor, "*rows width"],
    rotary: Rotary | None,
    attend: Attend,
    dtype: torch.dtype,
    *,
    keeps: Keeps,
) -> Float[Tensor, "*rows width"]:
    """What a layer makes of hidden states.

    Args:
        layer: the layer.
        rotary: of all tokens; None for a layer without rotary embeddings.
        attend: its attention.
        dtype: of its products.
        keeps: for backward.
    """
    parameters = layer.trained()
    if not torch.is_grad_enabled() or not (hidden.requires_grad or parameters):
        x = hidden.reshape(-1, hidden.shape[-1])
        with without_autocast(x.device):
            return Pass(layer, attend, dtype, rotary).forward(x).view(hidden.shape)
    cos, sin = rotary or (None, None)
    return _Layer.apply(_How(layer, attend, dtype, keeps), hidden, cos, sin, *parameters)


class _How(NamedTuple):
    """How hidden states go through a layer."""

    layer: DecoderLayer
    attend: Attend
    dtype: torch.dtype
    keeps: Keeps


class _Attended(NamedTuple):
    """Attention, with a graph where its gradient is to come."""

    heads: Heads
    graph: Float[Tensor, "tokens gathered"]

    @property
    def out(self) -> Tensor:
        """What it gathered, without a graph."""
        return self.graph.detach()

    def gradients(self, slopes: Tensor) -> list[Tensor]:
        """Those at what it took, of that at what it gathered."""
        return [*torch.autograd.grad(self.graph, self.heads, slopes)]


class Raw(NamedTuple):
    """Queries and keys before the norms of heads."""

    query: Float[Tensor, "tokens heads dim"]
    key: Float[Tensor, "tokens kv_heads dim"]


class Pass:
    """One pass through a layer, forward or backward, with what it has computed so far.

    Args:
        layer: the layer.
        attention_of: its attention; None where its first half is given.
        dtype: of the products.
        rotary: cosines and sines.
        back: whether it goes backward.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        attention_of: Attend | None,
        dtype: torch.dtype,
        rotary: Rotary | None,
        back: bool = False,
    ) -> None:
        self.layer, self.attention_of, self.dtype, self.rotary = layer, attention_of, dtype, rotary
        make = partial(Projections, dtype=dtype, again=back)
        self.attention, self.output = make(layer.attention), make(layer.output)
        self.gates, self.down = make(layer.gates), make(layer.down)
        self.found: dict[int, Tensor] = {}
        """By the `id` of a norm's weight, its gradient."""

    @property
    def how(self) -> tuple[DecoderLayer, Attend | None, torch.dtype]:
        """What another pass through the layer is made of, but the rotary embeddings."""
        return self.layer, self.attention_of, self.dtype

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, of which nothing is kept."""
        mid = self.attended_residual(x)
        return self.last(mid, self.inner(*self.gated(mid)))[0]

    def attended_residual(self, x: Tensor) -> Tensor:
        """The residual after attention."""
        heads, _ = self.heads(self.normed(x, self.layer.norms[0])[0])
        return self.residual(x, self.attend(*heads, graph=False).graph)[0]

    def normed(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
        """What products take of a residual, and by what its rows were multiplied for that, if they were."""
        return (x.to(self.dtype), None) if norm is None else rms_norm(x, norm, self.dtype)

    def heads(self, normed: Tensor) -> tuple[Heads, Raw | None]:
        """Queries, keys and values of a normed input, and its gate, as attention takes them, and as the norms of heads
        do."""
        layer, dim = self.layer, self.layer.dim
        self.attention.reduce(normed)
        wide, key, value = (self.attention.product(normed, each) for each in range(3))
        key, value = (each.view(len(normed), -1, dim) for each in (key, value))
        both = wide.view(len(normed), -1, 2 * dim if layer.gated else dim)
        query, *gate = (each.contiguous() for each in both.split(dim, -1)) if layer.gated else (both,)
        del wide, both
        raw = None
        if layer.head_norms is not None:
            raw = Raw(query, key)
            query, key = (
                rms_norm(_rows(each, norm), norm, self.dtype)[0].view(each.shape)
                for each, norm in zip(raw, layer.head_norms, strict=True)
            )
        if self.rotary is not None:
            rotate_(query, key, *self.rotary)
        return (query, key, value, *gate), raw

    def attend(self, *heads: Tensor, graph: bool) -> _Attended:
        """Attention, with a graph or without one."""
        assert self.attention_of is not None
        if not graph:
            return _Attended(heads, self.attention_of(*heads))
        with torch.enable_grad():
            leaves = tuple(each.detach().requires_grad_() for each in heads)
            return _Attended(leaves, self.attention_of(*leaves))

    def residual(self, x: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual after attention, of what it gathered; and what was normed for it, if something was."""
        self.output.reduce(gathered)
        return self._onto(x, self.output, gathered, 0)

    def gated(self, mid: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up, of the residual after attention."""
        normed, _ = self.normed(mid, self.layer.norms[1])
        self.gates.reduce(normed)
        return self._gate_and_up(normed)

    def _gate_and_up(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Those of a normed residual, each in memory of its own."""
        parts = [self.gates.product(normed, each) for each in range(len(self.gates.parts))]
        parts = parts if len(parts) == 2 else [each.contiguous() for each in parts[0].chunk(2, 1)]
        gate, up = reversed(parts) if self.layer.up_first else parts
        return gate if self.layer.gate_factor == 1 else gate.mul_(self.layer.gate_factor), up

    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        """What the gate gives."""
        return gate_product(gate, up, self.layer.activation)

    def last(self, mid: Tensor, inner: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's output, of what its gate gives; and what was normed for it, if something was."""
        self.down.reduce(inner)
        return self._onto(mid, self.down, inner, 1)

    def _onto(self, residual: Tensor, part: Projections, x: Tensor, half: int) -> tuple[Tensor, Tensor | None]:
        norm, factor = self.layer.after[half], self.layer.factors[half]
        if norm is None and residual.dtype == self.dtype:
            return part.product(x, 0, onto=residual, factor=factor), None
        given = part.product(x, 0)
        added = given if norm is None else rms_norm(given, norm, self.dtype)[0]
        return torch.add(residual, added, alpha=factor), None if norm is None else given

    # -- backward -------------------------------------------------------------------------------------------------

    def mlp_backward(
        self, grad: Tensor, mid: Tensor, gated: tuple[Tensor, Tensor] | None, given: Tensor | None
    ) -> Tensor:
        """The gradient at the residual after attention, of that at the layer's output.

        Args:
            gated: what `gated` gave in forward, which is written over; None: it is computed again.
            given: what was normed after the MLP; None: it is computed again, if there is such a norm.
        """
        norm, after = self.layer.norms[1], self.layer.after[1]
        normed, scale = self.normed(mid, norm)
        self.gates.reduce(normed)
        gate, up = gated or self._gate_and_up(normed)
        again = after is not None and given is None
        early = self.down.drops or again  # dropout draws in the order of forward
        if early:
            inner = self.inner(gate, up)
            self.down.reduce(inner)
            given = self.down.product(inner, 0) if again else given
            del inner
        outer = self._of_added(grad, given, 1)
        inner = self.down.input_gradient([outer])
        gate_backward_(inner, gate, up, self.layer.activation)
        if not early:
            self.down.reduce(inner)
        self.down.weight_gradients(inner, [outer])
        del inner, outer, given
        gate = gate if self.layer.gate_factor == 1 else gate.mul_(self.layer.gate_factor)
        grads = [up, gate] if self.layer.up_first else [gate, up]
        grads = grads if len(self.gates.parts) == 2 else [torch.cat(grads, 1)]
        del gate, up, gated
        slopes = self.gates.input_gradient(grads)
        self.gates.weight_gradients(normed, grads)
        del grads, normed
        return self._norm_backward(slopes, mid, scale, norm, add=grad)

    def attention_backward(
        self,
        grad: Tensor,
        x: Tensor,
        normed: tuple[Tensor, Tensor | None],
        attended: _Attended | HeadsAgain,
        before: tuple[Raw | None, Tensor | None],
        on: bool,
    ) -> Tensor | None:
        """The gradient at the layer's input, of that at the residual after attention; None unless it goes on.

        Args:
            normed: the input, normed, and its scale.
            attended: with its graph.
            before: queries and keys before their norms, and what was normed after attention.
            on: whether the gradient at the input, or at the norm's weight, is wanted.
        """
        raw, given = before
        slopes = self.output_backward(grad, attended.out, given)
        found = attended.gradients(slopes)
        del slopes
        return self.heads_backward(found, x, normed, raw, on, add=grad)

    def output_backward(self, grad: Tensor, gathered: Tensor, given: Tensor | None) -> Tensor:
        """The gradient at what attention gathered, of that at the residual after it."""
        outer = self._of_added(grad, given, 0)
        slopes = self.output.input_gradient([outer])
        self.output.weight_gradients(gathered, [outer])
        return slopes

    def heads_backward(
        self,
        found: list[Tensor],
        x: Tensor,
        normed: tuple[Tensor, Tensor | None],
        raw: Raw | None,
        on: bool,
        add: Tensor | None = None,
    ) -> Tensor | None:
        """The gradient at the layer's input, of those at what attention takes (which are taken out of their list, and
        written over); with `add` added to it. Other arguments as `attention_backward` takes them."""
        layer = self.layer
        query, key, value, *gate = (each.to(self.dtype).contiguous() for each in found)
        found.clear()
        if self.rotary is not None:
            rotate_(query, key, *self.rotary, back=True)
        if raw is not None and layer.head_norms is not None:
            query, key = (
                self._head_norm_backward(*each) for each in zip((query, key), raw, layer.head_norms, strict=True)
            )
        query = torch.cat((query, *gate), -1) if gate else query
        grads = [each.view(len(each), -1) for each in (query, key, value)]
        del gate
        self.attention.weight_gradients(normed[0], grads)
        if not on:
            return None
        slopes = self.attention.input_gradient(grads)
        del query, key, value, grads
        return self._norm_backward(slopes, x, normed[1], layer.norms[0], add=add)

    def _head_norm_backward(self, grad: Tensor, raw: Tensor, norm: Norm) -> Tensor:
        rows = _rows(raw, norm)
        scale = rms_norm(rows, norm, self.dtype)[1]
        return self._norm_backward(grad.view(rows.shape), rows, scale, norm).view(raw.shape)

    def _of_added(self, grad: Tensor, given: Tensor | None, half: int) -> Tensor:
        """A gradient at a residual, as one at what a half of the layer gives, which is normed and added to it."""
        norm, factor, outer = self.layer.after[half], self.layer.factors[half], grad.to(self.dtype)
        if factor != 1:
            outer = outer * factor
        if norm is None or given is None:
            return outer
        return self._norm_backward(outer, given, rms_norm(given, norm, self.dtype)[1], norm)

    def _norm_backward(
        self, grad: Tensor, x: Tensor, scale: Tensor | None, norm: Norm | None, add: Tensor | None = None
    ) -> Tensor:
        """The gradient at what was normed, with `add` added to it."""
        if norm is None or scale is None:
            return grad if add is None else torch.add(add, grad)
        found, of_weight = rms_norm_backward(grad, x, scale, norm, add)
        if of_weight is not None:
            self.found[id(norm.weight)] = of_weight
        return found

    def gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """What was found of parameters."""
        found = self.found | self.attention.found | self.output.found | self.gates.found | self.down.found
        return [found.get(id(each)) for each in parameters]


def _rows(x: Tensor, norm: Norm) -> Tensor:
    """Queries or keys as rows of what their norm is over."""
    return x.view(-1, norm.weight.shape[0])


HIDDEN = 1
"""Which of `_Layer`'s arguments is the layer's input."""


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: _How, hidden: Tensor, cos: Tensor | None, sin: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        ctx.how, ctx.parameters = how, parameters
        layer, attend, dtype, keeps = how
        x = hidden.reshape(-1, hidden.shape[-1])
        work = Pass(layer, attend, dtype, None if cos is None or sin is None else (cos, sin))
        ctx.attended, kept = None, []
        with without_autocast(x.device):
            ctx.surroundings = Surroundings(hidden, layer.random)
            if keeps == "input":
                out = work.forward(x)
            else:
                heads, raw = work.heads(work.normed(x, layer.norms[0])[0])
                everything = keeps == "products"
                ctx.attended = work.attend(*heads, graph=True) if everything else HeadsAgain(attend, heads)
                del heads
                mid, first = work.residual(x, ctx.attended.out)
                gate, up = work.gated(mid)
                out, second = work.last(mid, work.inner(gate, up))
                kept = [mid, gate, up, first, second, *(raw or ())] if everything else []
        ctx.save_for_backward(x, cos, sin, *kept)
        return out.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, *kept = ctx.saved_tensors
        (layer, attend, dtype, _), shape = ctx.how, grads[0].shape
        grad = grads[0].reshape(x.shape)
        norm = layer.norms[0]
        goes_on = ctx.needs_input_grad[HIDDEN] or (norm is not None and norm.weight.requires_grad)
        with ctx.surroundings.restored():
            work = Pass(layer, attend, dtype, None if cos is None else (cos, sin), back=True)
            normed = work.normed(x, norm)
            attended, ctx.attended = ctx.attended, None
            if kept:
                mid, gate, up, first, second, *both = kept
                raw, gated = Raw(*both) if both else None, (gate, up)
                work.attention.reduce(normed[0])
                work.output.reduce(attended.out)
                del gate, up
            else:
                heads, raw = work.heads(normed[0])
                gated, second = None, None
                if attended is None:
                    attended = work.attend(*heads, graph=True)
                else:
                    attended.give(heads)
                mid, first = work.residual(x, attended.out)
                del heads
            del kept
            between = work.mlp_backward(grad, mid, gated, second)
            del mid, grad, second
            found = work.attention_backward(between, x, normed, attended, (raw, first), goes_on)
        of_hidden = found.view(shape) if found is not None and ctx.needs_input_grad[HIDDEN] else None
        before, after = (None,) * HIDDEN, (None, None)
        return *before, of_hidden, *after, *work.gradients(ctx.parameters)
