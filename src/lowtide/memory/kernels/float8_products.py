"""Products of trained weights in 8 bits: rows of both factors are put into e4m3 for each product (`ops.layers.float8`).

Forward and the gradient at the input are taken so, which is two thirds of a step's products; the gradient of a weight
is a sum over tokens and stays in bfloat16, as in the row-wise recipe of torchao with high-precision weight gradients.
Weights and what is saved stay as they are. Fused layers ask `in_8_bits`, and do the same.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowtide.compat.peft import linears_beside_adapters
from lowtide.compat.transformers import checkpointed_layers
from lowtide.ops.layers.float8 import fits, in_rows, input_gradient, multiplies, product
from lowtide.ops.target import autocast_dtype, without_autocast


def trained_linears(model: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers of a model's layers whose weights are trained and have sizes that 8 bits are multiplied in."""
    for layer in checkpointed_layers(model):
        yield from (each for each in linears_beside_adapters(layer) if each.weight.requires_grad and fits(each.weight))


def multiply_in_float8(model: nn.Module) -> None:
    """Has these layers take their products in 8 bits, wherever they compute in bfloat16."""
    for layer in trained_linears(model):
        layer.forward = types.MethodType(_forward, layer)


def in_8_bits(layer: nn.Module) -> bool:
    """Whether a linear layer takes its products in 8 bits."""
    return getattr(vars(layer).get("forward"), "__func__", None) is _forward


def _forward(self: Any, x: Tensor) -> Tensor:
    x = x.to(autocast_dtype(x.device) or x.dtype)
    if not multiplies(x):
        return type(self).forward(self, x)
    with without_autocast(x.device):
        out = cast(Tensor, _Product.apply(x, self.weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """[..., inputs] to [..., outputs]; both factors are put into 8 bits again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = product(in_rows(x.reshape(-1, x.shape[-1])), in_rows(weight), x.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = input_gradient(rows, in_rows(weight)).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        return of_x, of_weight
