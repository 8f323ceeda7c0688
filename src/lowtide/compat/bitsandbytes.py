"""What the project takes from the inside of bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def is_4_bit(weight: Any) -> bool:
    """Whether a weight is stored in 4 bits."""
    return getattr(weight, "quant_state", None) is not None


def dense_4_bit(weight: Any, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]: what a weight in 4 bits stands for."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state).to(dtype)


def dense_of(layer: Any) -> Callable[[torch.dtype], Tensor] | None:
    """How the whole weight of a layer in 4 bits is made, or of what stands for one in a plan; None of other layers."""
    if is_4_bit(layer.weight):
        return partial(dense_4_bit, layer.weight)
    return getattr(layer, "dense", None)
