"""CUDA's rules of autocast, for CPU tensors.

Both kinds of autocast compute matrix products in 16 bits. Beyond that CUDA's computes many functions in float32, from
copies that backward may hold, where a CPU's takes what comes: a layer norm's output is twice as large on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.torch import beneath_autocast, own_kernels

HALF = (torch.float16, torch.bfloat16)
CAST_TO_FLOAT32 = (
    "layer_norm", "group_norm", "cosine_similarity", "norm.Scalar", "norm.ScalarOpt_dim", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "log10",
    "softplus", "logsumexp",
)  # fmt: skip
"""What autocast computes from float32 copies on CUDA, and as it comes on a CPU (`aten/src/ATen/autocast_mode.h`)."""
GIVEN_IN_FLOAT32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod")
"""What it gives a float32 result without such a copy."""


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """While it lasts, autocast of a CPU has CUDA's rules, in every thread, and wherever layers run again."""
    with own_kernels("aten") as kernels:
        for names, kernel in ((CAST_TO_FLOAT32, _cast), (GIVEN_IN_FLOAT32, _given)):
            for name in names:
                packet, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                kernels.impl(name, functools.partial(kernel, op), "AutocastCPU")
        yield


def _cast(op: Any, *args: Any, **kwargs: Any) -> Any:
    with beneath_autocast():
        return op(*map(_in_float32, args), **{name: _in_float32(each) for name, each in kwargs.items()})


def _given(op: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_half(tensor) and kwargs.get("dtype") is None and not any(isinstance(each, torch.dtype) for each in args):
        kwargs["dtype"] = torch.float32
    with beneath_autocast():
        return op(tensor, *args, **kwargs)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF


def _in_float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value
