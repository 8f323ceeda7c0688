"""The attention half of a decoder layer whose MLP is not known (a mixture of experts), in two autograd functions.

One has all before attention: the norm, queries, keys and values with their adapters, norms of heads, rotary embeddings.
The other has the product behind it, with its adapter, and the residual. Attention between them, and the MLP after them,
are the model's own, with graphs of their own: checkpointing, hooks on routers and parameters of attention (sinks) work
as without. A layer whose MLP is known is one function (`decoder_layer`), which keeps less.

What is computed, and what is exact, is `decoder_layer`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.layers.decoder_layer import Attend, DecoderLayer, Heads, Pass, Raw, Rotary
from lowtide.ops.layers.layer_kernels import Norm, rms_norm, rms_norm_backward
from lowtide.ops.surroundings import Surroundings
from lowtide.ops.target import without_autocast


def attention_half(
    layer: DecoderLayer,
    hidden: Float[Tensor, "*rows width"],
    rotary: Rotary | None,
    attend: Attend,
    dtype: torch.dtype,
) -> Float[Tensor, "*rows width"]:
    """The residual after a layer's attention; arguments as `decoder_layer` takes them."""
    work = Pass(layer, attend, dtype, rotary)
    cos, sin = rotary or (None, None)
    heads = _Heads.apply(work, hidden, cos, sin, *layer.attention.trained(), *_trained(layer.norms[0], *_of(layer)))
    out = _Onto.apply(work, hidden, attend(*heads), *layer.output.trained(), *_trained(layer.after[0]))
    return out.view(hidden.shape)


def normed(x: Float[Tensor, "*rows width"], norm: Norm, dtype: torch.dtype) -> Float[Tensor, "*rows width"]:
    """Normed rows in a dtype; computed again from their input in backward."""
    return _Normed.apply(x, norm.weight, norm, dtype)


def _of(layer: DecoderLayer) -> tuple[Norm, ...]:
    return layer.head_norms or ()


def _trained(*norms: Norm | None) -> list[Tensor]:
    return [norm.weight for norm in norms if norm is not None and norm.weight.requires_grad]


BEFORE = 4
"""Arguments of `_Heads` before parameters."""


class _Heads(torch.autograd.Function):
    """Hidden states to queries, keys and values, [tokens, heads, dim] each, and to a gate where there is one."""

    @staticmethod
    def forward(
        ctx: Any, work: Pass, hidden: Tensor, cos: Tensor | None, sin: Tensor | None, *parameters: Tensor
    ) -> Heads:
        x = hidden.reshape(-1, hidden.shape[-1])
        with without_autocast(x.device):
            ctx.surroundings = Surroundings(hidden, work.layer.random)
            heads, raw = work.heads(work.normed(x, work.layer.norms[0])[0])
        ctx.how, ctx.parameters, ctx.shape = work.how, parameters, hidden.shape
        ctx.save_for_backward(x, cos, sin, *(raw or ()))
        return heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, *both = ctx.saved_tensors
        layer, attend, dtype = ctx.how
        norm = layer.norms[0]
        on = ctx.needs_input_grad[1] or bool(_trained(norm))
        with ctx.surroundings.restored(), without_autocast(x.device):
            work = Pass(layer, attend, dtype, None if cos is None else (cos, sin), back=True)
            again = work.normed(x, norm)
            work.attention.reduce(again[0])
            own = [each.clone(memory_format=torch.contiguous_format) for each in grads]  # they are written over
            found = work.heads_backward(own, x, again, Raw(*both) if both else None, on)
        of_hidden = found.view(ctx.shape) if found is not None and ctx.needs_input_grad[1] else None
        return None, of_hidden, None, None, *work.gradients(ctx.parameters)


class _Onto(torch.autograd.Function):
    """What attention gathered, [tokens, gathered], onto the residual."""

    @staticmethod
    def forward(ctx: Any, work: Pass, hidden: Tensor, gathered: Tensor, *parameters: Tensor) -> Tensor:
        x = hidden.reshape(-1, hidden.shape[-1])
        with without_autocast(x.device):
            ctx.surroundings = Surroundings(hidden, work.layer.random)
            out, given = work.residual(x, gathered)
        ctx.how, ctx.parameters, ctx.shape = work.how, parameters, hidden.shape
        ctx.save_for_backward(gathered, given)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gathered, given = ctx.saved_tensors
        layer, attend, dtype = ctx.how
        with ctx.surroundings.restored(), without_autocast(grad.device):
            work = Pass(layer, attend, dtype, None, back=True)
            work.output.reduce(gathered)
            slopes = work.output_backward(grad, gathered, given)
        return None, grad.view(ctx.shape), slopes, *work.gradients(ctx.parameters)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.norm, ctx.dtype = norm, dtype
        return rms_norm(_rows(x), norm, dtype)[0].view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = _rows(x)
        scale = rms_norm(rows, ctx.norm, ctx.dtype)[1]
        found, of_weight = rms_norm_backward(_rows(grad), rows, scale, ctx.norm)
        return found.view(x.shape), of_weight, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
