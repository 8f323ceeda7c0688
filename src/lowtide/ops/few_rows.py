"""Products of a few rows with weights that are laid out for them, in float32 on a CPU.

Where completions are written, a product has as many rows as there are completions, and its time is that of reading the
weight. BLAS copies blocks of a weight to where they can be multiplied, in every product, which for few rows takes more
time than the product. oneDNN takes weights that are laid out beforehand: a product of 8 rows then takes half the time.
The layout is a copy, which is made for as long as the weight stays what it is. PyTorch's compiler lays out the weights
of frozen models so (`torch/_inductor/fx_passes/mkldnn_fusion.py`).

Sums are taken in another order than by BLAS, so that products are the same to rounding.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.compat.torch import FakeTensor, laid_out_product, laid_out_weight, lays_out_weights
from lowtide.ops.target import kind_of

FEWEST, MOST = 2, 64
"""Rows. One row's product is that of a matrix and a vector, which reads a weight as it lies."""
SMALLEST = 3 << 14
"""Numbers of a weight: the product with a smaller one takes less time than the call."""
ATTRIBUTE = "laid_out"
"""Of a weight: itself, laid out."""


@functools.cache
def _lays_out() -> bool:
    """Whether this build of torch, on this machine, has such products."""
    return lays_out_weights() and platform.machine().lower() in ("x86_64", "amd64")


def is_laid_out_for(weight: Tensor) -> bool:
    """Whether products of few rows with a weight gain by a layout of it."""
    plain = weight.dim() == 2 and weight.dtype == torch.float32 and kind_of(weight.device) == "cpu"
    return plain and weight.numel() >= SMALLEST and _lays_out()


@contextlib.contextmanager
def beside(weight: Float[Tensor, "outputs inputs"]) -> Iterator[Tensor]:
    """While it lasts, a weight that does not change has a layout; of one without memory, what takes as much."""
    plain = weight.detach()
    is_plan = isinstance(plain, FakeTensor)
    made = torch.empty_like(plain) if is_plan else laid_out_weight(plain, MOST)
    setattr(weight, ATTRIBUTE, made)
    try:
        yield made
    finally:
        delattr(weight, ATTRIBUTE)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor | None:
    """`x W' + bias + onto`, [.., outputs], by the layout of the weight and without a gradient; None where the weight is
    multiplied as it lies. Compiled layers ask, too.

    Args:
        x: [.., inputs].
        weight: [outputs, inputs].
        bias: [outputs].
        onto: [.., outputs].
    """
    laid_out = getattr(weight, ATTRIBUTE, None)
    if laid_out is None or not laid_out.is_mkldnn or x.dtype != torch.float32:
        return None
    few = FEWEST <= x.numel() // x.shape[-1] <= MOST
    return laid_out_product(x, laid_out, bias, onto) if few else None
