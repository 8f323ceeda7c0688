"""A linear layer with a low-rank adapter as one autograd function, inside of what else runs as it is.

As PEFT computes it, the adapter's product is scaled and added over the whole output, and so is its gradient at the
input. Here the large products add to the small ones in their epilogues (`lora_linear`). The input alone is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.layers.lora_linear import Projections, Together
from lowtide.ops.surroundings import Surroundings
from lowtide.ops.target import without_autocast


def adapted_linear(
    layer: Together, x: Float[Tensor, "*rows inputs"], dtype: torch.dtype
) -> Float[Tensor, "*rows outputs"]:
    """What a linear layer gives.

    Args:
        layer: it alone.
        dtype: of its products.
    """
    parameters = layer.trained()
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return _forward(Projections(layer, dtype), x)
    return _Linear.apply(layer, dtype, x, *parameters)


def _forward(work: Projections, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    with without_autocast(x.device):
        rows = rows.to(work.dtype)
        work.reduce(rows)
        return work.product(rows, 0).view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Together, dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.dtype, ctx.parameters = layer, dtype, parameters
        ctx.surroundings = Surroundings(x, layer.drops)
        ctx.save_for_backward(x)
        return _forward(Projections(layer, dtype), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,) = ctx.saved_tensors, grads
        slopes = [grad.reshape(-1, grad.shape[-1]).to(ctx.dtype)]
        with ctx.surroundings.restored(), without_autocast(x.device):
            work = Projections(ctx.layer, ctx.dtype)
            rows = x.reshape(-1, x.shape[-1]).to(ctx.dtype)
            work.reduce(rows)
            found = work.input_gradient(slopes).view(x.shape).to(x.dtype) if ctx.needs_input_grad[2] else None
            work.weight_gradients(rows, slopes)
        return None, None, found, *(work.found.get(id(each)) for each in ctx.parameters)
