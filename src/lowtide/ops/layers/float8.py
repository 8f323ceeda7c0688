"""Matrix products of 8-bit floating-point factors (e4m3, arXiv 2209.05433), with a scale for each row of a factor.

A row is divided by the smallest power of two that brings all of it to 448, the largest number of the format, or below,
and the product is multiplied by the rows' scales (`torch._scaled_mm`). A weight [outputs, inputs] has a scale for each
output. Its product with a gradient is over these, so that the gradient is multiplied by them before it gets scales of
its own. Powers of two round nothing themselves, in no dtype.

Not exact: a number keeps 3 bits behind the leading one, which is 2.6% of a weight or an activation (root mean square of
normal numbers), and 3.7% of a product of both. Sums are in float32.

Shapes: rows of an activation are tokens, those of a weight its outputs. They stand in docstrings here, since compiled
layers trace these functions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.compat.torch import scaled_product
from lowtide.ops.layers.layer_kernels import launch, next_power, uses_kernels, warps_of
from lowtide.ops.target import Target, target_of

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
MANTISSA = (1 << 23) - 1
"""The bits of a float32 number behind its exponent."""
MULTIPLE = 16
"""Of which both sizes of a weight are to be, for the products of GPUs."""
CAPABILITY = (8, 9)
"""The first of NVIDIA's with such products: Ada; Hopper and Blackwell have them too."""


class RowScaled(NamedTuple):
    """A matrix in 8 bits."""

    codes: Tensor
    """[rows, columns]; several matrices behind one another have a size before."""
    scales: Tensor
    """[rows, 1]: by which rows are multiplied, in float32."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[rows, columns]: the numbers that it stands for, exactly."""
        return self.codes.to(dtype).mul_(self.scales.to(dtype))


def in_rows(x: Tensor, factors: Tensor | None = None) -> RowScaled:
    """A matrix [rows, columns] in 8 bits, its columns multiplied by `factors` [columns, 1] before."""
    rows, columns = x.shape
    if uses_kernels(x):
        codes = x.new_empty(x.shape, dtype=FORMAT)
        scales = x.new_empty((rows, 1), dtype=torch.float32)
        launch("in_rows", (rows,), (x, x if factors is None else factors), (codes, scales), width=columns,
               FACTORS=factors is not None, BLOCK=next_power(columns), num_warps=warps_of(columns))  # fmt: skip
        return RowScaled(codes, scales)
    wide = x.to(torch.float32) if factors is None else x * factors.view(-1)
    scales = _power_from(wide.abs().amax(1, keepdim=True).float().div_(LARGEST))
    return RowScaled((wide / scales).to(FORMAT), scales)


def _power_from(x: Tensor) -> Tensor:
    """The least powers of two that are no less; 1 for 0."""
    bits = (x.view(torch.int32) + MANTISSA) & ~MANTISSA
    return bits.view(torch.float32).masked_fill_(x == 0, 1.0)


def product(x: RowScaled, weight: RowScaled, dtype: torch.dtype) -> Tensor:
    """[tokens, outputs]: `x @ weight.t()`, in a dtype of 16 bits."""
    return scaled_product(x.codes, weight.codes.t(), x.scales, weight.scales.t(), out_dtype=dtype)


def input_gradient(grad: Tensor, weight: RowScaled) -> Tensor:
    """[tokens, inputs]: `grad @ weight`, in the dtype of the gradient, which is one of 16 bits."""
    slopes = in_rows(grad, weight.scales)
    ones = slopes.scales.new_ones((1, weight.codes.shape[1]))
    return scaled_product(slopes.codes, _by_columns(weight.codes), slopes.scales, ones, out_dtype=grad.dtype)


SCALES = "_row_scales"
"""How the buffer is named that a module has beside a weight which is stored in 8 bits, behind the weight's name."""


def store(layer: nn.Module, rows: RowScaled, name: str = "weight") -> None:
    """Has a module hold a weight in 8 bits, frozen; as bytes, which ranks can send to one another."""
    setattr(layer, name, nn.Parameter(rows.codes.view(torch.uint8), requires_grad=False))
    layer.register_buffer(name + SCALES, rows.scales, persistent=False)


def stored(layer: nn.Module, name: str = "weight") -> RowScaled | None:
    """The weight of a module that is stored in 8 bits; None of others."""
    scales: Any = getattr(layer, name + SCALES, None)
    return None if scales is None else RowScaled(getattr(layer, name).view(FORMAT), scales)


def linear(x: Tensor, weight: RowScaled) -> Tensor:
    """What a linear layer without bias gives, [..., outputs] of [..., inputs], in the dtype of its input: of bfloat16,
    by a product in 8 bits where the device has one; else by the weight made dense."""
    rows = x.reshape(-1, x.shape[-1])
    out = product(in_rows(rows), weight, x.dtype) if multiplies(x) else rows @ weight.dense(x.dtype).t()
    return out.view(*x.shape[:-1], -1)


def linear_backward(grad: Tensor, weight: RowScaled) -> Tensor:
    """The gradient at the input of `linear`, of that at its output."""
    rows = grad.reshape(-1, grad.shape[-1])
    out = input_gradient(rows, weight) if multiplies(grad) else rows @ weight.dense(grad.dtype)
    return out.view(*grad.shape[:-1], -1)


def multiplies(x: Tensor) -> bool:
    """Whether products of a tensor are taken in 8 bits: in bfloat16 alone, in which GPUs give their results."""
    return x.dtype == torch.bfloat16 and multiplies_on(x)


def fits(weight: Tensor) -> bool:
    """Whether a weight has sizes that GPUs multiply in 8 bits."""
    return weight.dim() == 2 and not any(size % MULTIPLE for size in weight.shape)


def multiplies_on(tensor: Tensor) -> bool:
    """Whether the device of a tensor multiplies in 8 bits."""
    return _multiplies(target_of(tensor), tensor.device)


@functools.cache
def _multiplies(target: Target, device: torch.device) -> bool:
    if target.kind != "cuda" or target.planned:
        return target.kind == "cpu" or target.capability >= CAPABILITY
    if target.capability < CAPABILITY:
        return False
    try:  # of some cards, some builds of torch lack the kernel with a scale a row
        one = in_rows(torch.ones(MULTIPLE, MULTIPLE, dtype=torch.bfloat16, device=device))
        product(one, one, torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def _by_columns(codes: Tensor) -> Tensor:
    """The second factor as GPUs take it: column by column."""
    return codes.t().contiguous().t() if uses_kernels(codes) else codes
