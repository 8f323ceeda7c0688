"""Weights that stand for bitsandbytes' 4-bit ones: the same bytes stored, the same tensors made, and no values.

The real ones are quantized as they are loaded, by kernels that need values. What they hold is known: half a byte for
each weight and a scale for each 64 of them, which is a float32 number or, with double quantization, 8 bits of one and a
float32 scale of its own for each 256 (QLoRA, arXiv 2305.14314). What they make is a copy of the whole weight for each
product, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.ops.layers.stacks import STAND_INS, StoredStack, plain_stacks
from lowtide.process.ways_out import in_python

SCALED, SCALES_SCALED = 64, 256
"""Weights that share a scale, and scales that share one."""


class FourBits:
    """A weight of a module, from now on as if it were stored in 4 bits: codes in its place, scales in buffers.

    Args:
        double: whether the scales are quantized too.
    """

    def __init__(self, module: nn.Module, name: str, *, double: bool) -> None:
        self.module, self.name, self.nested = module, name, double
        weight: Tensor = getattr(module, name)
        self.shape, self.dtype = weight.shape, weight.dtype
        count, device = weight.numel(), weight.device
        codes = torch.empty(-(-count // 2), 1, dtype=torch.uint8, device=device)
        setattr(module, name, nn.Parameter(codes, requires_grad=False))
        scales = -(-count // SCALED)
        kind = torch.uint8 if double else torch.float32
        module.register_buffer(f"{name}_scales", torch.empty(scales, dtype=kind, device=device), persistent=False)
        if double:
            nested = torch.empty(-(-scales // SCALES_SCALED), dtype=torch.float32, device=device)
            module.register_buffer(f"{name}_nested_scales", nested, persistent=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """A copy of the weight."""
        scales: Tensor = getattr(self.module, f"{self.name}_scales")
        scales = torch.empty(scales.shape, dtype=torch.float32, device=scales.device) if self.nested else scales
        return torch.empty(self.shape, dtype=self.dtype, device=scales.device).to(dtype)


class FourBitLinear(nn.Linear):
    """A linear layer of the same form, whose weight is stored in 4 bits.

    Args:
        like: the layer that is quantized.
        double: whether the scales are quantized too.
        compute_dtype: of the product.
    """

    def __init__(self, like: nn.Linear, *, double: bool, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = like.in_features, like.out_features, like.bias
        self.weight, self.compute_dtype = like.weight, compute_dtype
        self.stored = FourBits(self, "weight", double=double)

    def forward(self, x: Tensor) -> Tensor:
        product: Any = _Product.apply(x.to(self.compute_dtype), self)
        return product.to(x.dtype).clone()  # as PEFT does, before it adds what the adapter gives

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: a copy of the weight."""
        return self.stored.dense(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.dense(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.dense(grad.dtype), None


def check_four_bit(quantization_config: Any, adapters: Any) -> None:
    """Refuses what is not traced, or not trained.

    Raises:
        ValueError: another quantization than bitsandbytes' in 4 bits, or no adapters on it.
    """
    if quantization_config is None:
        return
    if not getattr(quantization_config, "load_in_4bit", False):
        raise ValueError(
            f"weights quantized by {type(quantization_config).__name__} are not traced, but for load_in_4bit=True of "
            "bitsandbytes: leave the quantization out to plan, or measure a short run"
        )
    if adapters is None:
        raise ValueError(
            "quantized weights cannot be trained themselves: set "
            f"use_peft=True{in_python(' (or pass a `peft_config`)')}"
        )


def store_in_four_bits(model: nn.Module, quantization_config: Any = None) -> None:
    """Has the linear layers of a model's layers, and their stacks of experts' weights, stand for 4-bit ones; embeddings
    and head stay as they are.

    Args:
        quantization_config: a `BitsAndBytesConfig`; by default scales are not quantized, and products are in the
            dtype of the weights.
    """
    double = bool(getattr(quantization_config, "bnb_4bit_use_double_quant", False))
    compute_dtype = getattr(quantization_config, "bnb_4bit_compute_dtype", None)
    for stack in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for parent in list(stack.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    dtype = compute_dtype or child.weight.dtype
                    quantized = FourBitLinear(child, double=double, compute_dtype=dtype)
                    setattr(parent, name, quantized)
        for experts, name in plain_stacks(stack):
            stored = FourBits(experts, name, double=double)
            vars(experts).setdefault(STAND_INS, {})[name] = StoredStack(stored.shape, stored.dense)
