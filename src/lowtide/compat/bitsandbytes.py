"""What the project takes from the inside of bitsandbytes."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lowtide.compat.transformers import has_stacks, stack_names

LARGEST = 2**31 - 1
"""Numbers of a weight that bitsandbytes' kernels count."""
STATES = "_lowtide_quant_states"
"""The attribute of a module: by name, the states of its weights in 4 bits."""


def quant_state(module: Any, name: str = "weight") -> Any:
    """What bitsandbytes knows of a module's weight in 4 bits; None of other weights. One that is gathered from shards
    has lost it: it is what it was when it was last seen whole."""
    weight: Any = getattr(module, name)
    seen = vars(module).setdefault(STATES, {})
    if getattr(weight, "quant_state", None) is not None:
        seen[name] = weight.quant_state
    return None if weight.is_floating_point() else seen.get(name)


def in_4_bits(weight: Tensor, **how: Any) -> nn.Parameter:
    """A weight of any shape in 4 bits, frozen.

    Args:
        how: what bitsandbytes' own layers have of their weights, such as `quant_type` (NF4 by default).
    """
    from bitsandbytes import nn as bitsandbytes

    layers: Any = bitsandbytes
    return layers.Params4bit(weight, requires_grad=False, **{"quant_type": "nf4", **how}).to(weight.device)


def dense_4_bit(module: Any, dtype: torch.dtype, name: str = "weight") -> Tensor:
    """What a module's weight in 4 bits stands for, [outputs, inputs] of a matrix."""
    from bitsandbytes.functional import dequantize_4bit

    weight, state = getattr(module, name), quant_state(module, name)
    if not reads_apart(module, name):
        return dequantize_4bit(weight.data, state).to(dtype)
    blocks = copy.copy(state)
    count = state.shape.numel()
    blocks.shape = torch.Size((1, count) if count % state.blocksize else (count // state.blocksize, state.blocksize))
    return dequantize_4bit(weight.data, blocks).view(state.shape).to(dtype)


def multiplied_4_bit(module: Any, dtype: torch.dtype) -> Tensor:
    """The matrix that bitsandbytes' own product of a layer in 4 bits multiplies by, for activations in a dtype: newer
    versions make it in that dtype from the start, where older ones make it in the one that the weight once had."""
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(quant_state(module))
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        state.dtype = dtype
    return dequantize_4bit(module.weight.data, state).to(dtype)


def reads_apart(module: Any, name: str = "weight") -> bool:
    """Whether bitsandbytes would read a weight in 4 bits with others' scales: scales are those of blocks of numbers,
    whichever rows these are of, and on a CPU it begins a block with each row."""
    state = quant_state(module, name)
    return getattr(module, name).device.type == "cpu" and state.shape[-1] % state.blocksize != 0


def dense_of(layer: Any) -> Callable[[torch.dtype], Tensor] | None:
    """How the whole weight of a layer in 4 bits is made, or of what stands for one in a plan; None of other layers."""
    return getattr(layer, "dense", None) if quant_state(layer) is None else partial(dense_4_bit, layer)


@contextlib.contextmanager
def stacks_in_4_bits() -> Iterator[None]:
    """While it lasts, transformers stores the stacks of experts' weights in 4 bits too where it loads a model in them,
    each as soon as it is joined from its files. By itself it does so with linear layers alone."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    with patch.dict(AUTO_QUANTIZER_MAPPING, bitsandbytes_4bit=_with_stacks()):
        yield


@functools.cache
def _with_stacks() -> type:
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

    class Quantize(Bnb4bitQuantize):
        def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, Any]:
            ((name, given),) = input_dict.items()
            if not self.hf_quantizer.is_stack(model, name):
                return super().convert(input_dict, model=model, **kwargs)
            config = self.hf_quantizer.quantization_config
            how = {"quant_type": config.bnb_4bit_quant_type, "compress_statistics": config.bnb_4bit_use_double_quant}
            return {name: in_4_bits(given[0] if isinstance(given, list) else given, **how)}

    class Quantizer(Bnb4BitHfQuantizer):
        def is_stack(self, model: Any, param_name: str) -> bool:
            module, name = get_module_from_name(model, param_name)
            converted = should_convert_module(param_name.rpartition(".")[0], self.modules_to_not_convert)
            is_one = converted and has_stacks(module) and name in stack_names(module)
            return is_one and getattr(module, name).numel() <= LARGEST

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return super().param_needs_quantization(model, param_name, **kwargs) or self.is_stack(model, param_name)

        def get_quantize_ops(self) -> Any:
            return Quantize(self)

    return Quantizer
