"""Linear layers in 16 bits on a CPU, in numbers of rows that recur.

oneDNN makes a kernel for each shape of a product, and keeps those of the last thousand with what they work in. Without
padding nearly every step has another number of tokens, so that each would make all of its kernels anew (2 to 5 ms
each), and the kept ones grow to hundreds of megabytes. Here rows of zeros fill up what is multiplied, to one of eight
numbers between one power of two and the next. Compiled layers multiply as they are.

Of a weight in float32 no copy in 16 bits waits for backward: it is made there again. A gradient of a weight is rounded
once, as autocast rounds it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.compat.torch import version_of
from lowtide.ops.target import kind_of

AS_THEY_ARE = 32
"""Rows up to which their number is left, and the least by which others differ."""
FILLED_UP = "_lowtide_filled_up"
"""The attribute of an input that has what is multiplied of it, and the version of the input that this is of."""


def recurring(rows: int) -> int:
    """The next of the numbers of rows that products are made of: at most an eighth, or 31, more."""
    if rows <= AS_THEY_ARE:
        return rows
    step = max(AS_THEY_ARE, 1 << (rows.bit_length() - 4))
    return -(-rows // step) * step


def filled_up(x: Float[Tensor, "some width"], rows: int, dtype: torch.dtype) -> Float[Tensor, "rows width"]:
    """In a dtype, with rows of zeros after its own up to so many; itself where it is so already."""
    if len(x) == rows and x.dtype == dtype:
        return x
    made = x.new_empty(rows, x.shape[1], dtype=dtype)
    made[: len(x)].copy_(x)
    made[len(x) :].zero_()
    return made


def narrow_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """In which 16 bits a linear layer computes on a CPU; None where it does not, or not on plain tensors."""
    if torch.compiler.is_compiling():  # first: what follows would break its graph
        return None
    if kind_of(x.device) != "cpu" or not x.numel():
        return None
    if type(weight) not in (Tensor, torch.nn.Parameter):
        return None
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        return dtype if dtype.itemsize == 2 and torch.float64 not in (x.dtype, weight.dtype) else None
    return x.dtype if x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) else None


def narrow_linear(
    x: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "*rows outputs"]:
    """As `torch.nn.functional.linear` under autocast to a dtype, which the result has."""
    return _NarrowLinear.apply(x, weight, bias, dtype)


def _rows_of(x: Tensor, dtype: torch.dtype) -> Float[Tensor, "rows inputs"]:
    """What is multiplied of an input: one copy for all layers that read it, which lives as long as the input."""
    now = None if x.is_inference() else version_of(x)
    version, rows = getattr(x, FILLED_UP, (None, None))
    if rows is not None and version == now and rows.dtype == dtype:
        return rows
    flat = x.reshape(-1, x.shape[-1])
    rows = filled_up(flat, recurring(len(flat)), dtype)
    if now is not None and rows is not flat:
        setattr(x, FILLED_UP, (now, rows))
    return rows


class _NarrowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows, count = _rows_of(x, dtype), x.numel() // x.shape[-1]
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, None if bias is None else bias.dtype)
        narrow = weight.to(dtype).t()
        out = rows @ narrow if bias is None else torch.addmm(bias.to(dtype), rows, narrow)
        return out[:count].view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_x, of_bias = ctx.dtypes
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        filled = filled_up(flat, recurring(len(flat)), flat.dtype)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            (filled @ weight.to(filled.dtype))[: len(flat)].to(of_x).view(ctx.shape) if needs_x else None,
            (filled.t() @ rows).to(weight.dtype) if needs_weight else None,
            flat.sum(0, dtype=torch.float32).to(of_bias) if needs_bias else None,
            None,
        )
