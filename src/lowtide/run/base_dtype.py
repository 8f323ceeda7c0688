"""Stores the frozen weights of layers in fewer bits than they were loaded in (`base_dtype`).

It is done as soon as a model has its adapters, before it goes to a device, which holds no more of a weight than is
kept. The adapters' folder, `merge` and `export` have nothing to do with it: they take the weights of the base's files.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lowtide.compat.peft import adapters_that_read_weights, linears_beside_adapters
from lowtide.compat.transformers import kept_wide
from lowtide.engine.forward import causal_model
from lowtide.engine.weights.loading import has_adapters, tell_of_whole_experts
from lowtide.engine.weights.quantized import is_quantized, put_in_float8, put_in_nvfp4
from lowtide.engine.weights.reference_storage import layer_lists
from lowtide.memory.options import FLOAT8, NVFP4
from lowtide.ops.layers.float8 import fits
from lowtide.ops.layers.stacks import plain_stacks, put_stack_in_float8
from lowtide.process.ways_out import in_python

STORED: dict[str, Callable[[nn.Linear, torch.device], None]] = {FLOAT8: put_in_float8, NVFP4: put_in_nvfp4}
"""The forms of `base_dtype`."""


def store_base(model: nn.Module, args: Any) -> None:
    """Stores the frozen weights of a model's layers as `base_dtype` says, and in FP8 their stacks of experts' weights
    too; embeddings, head, what the model keeps in float32 and matrices whose sizes are no multiples of 16 stay as they
    are.

    Args:
        model: with its adapters.
        args: the options of the run.

    Raises:
        ValueError: there are none, or they are quantized already, or adapters read them; says what to do.
    """
    wanted = getattr(args, "base_dtype", None)
    if wanted is None:
        return
    wide = kept_wide(causal_model(model))
    left = {id(layer) for name, layer in model.named_modules() if not wide.isdisjoint(name.split("."))}
    found = (layer for stack in layer_lists(model) for layer in linears_beside_adapters(stack))
    layers = [layer for layer in found if id(layer) not in left]
    _check(model, wanted, layers)
    for layer in layers:
        if not layer.weight.requires_grad and fits(layer.weight):
            STORED[wanted](layer, args.device)
    for experts, name in (each for stack in layer_lists(model) for each in plain_stacks(stack)):
        weight: torch.Tensor = getattr(experts, name)
        if wanted == FLOAT8 and not weight.requires_grad and fits(weight[0]):
            put_stack_in_float8(experts, name, args.device)
    tell_of_whole_experts(model)


def _check(model: nn.Module, wanted: str, layers: list[nn.Linear]) -> None:
    asked = f"base_dtype={wanted!r}"
    if not has_adapters(model):
        raise ValueError(
            f"{asked} stores weights that are not trained, beside adapters: set use_peft=True"
            f"{in_python(' (or pass a `peft_config`)')}, or leave base_dtype out"
        )
    if any(is_quantized(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"{asked} stores weights that are plain numbers in fewer bits, and the model's are quantized already: "
            "leave base_dtype out, or the quantization"
        )
    if reading := adapters_that_read_weights(model):
        raise ValueError(
            f"{asked} is for adapters beside a weight, and {reading} reads the weight itself: take plain LoRA, or "
            "leave base_dtype out"
        )
    if not any(fits(layer.weight) for layer in layers):
        raise ValueError(
            f"{asked} takes matrices with sizes that are multiples of 16, and the layers of {type(model).__name__} "
            "have none: leave base_dtype out"
        )
    if wanted == NVFP4 and find_spec("torchao") is None:
        raise ValueError(f"{asked} needs torchao, which is not installed: pip install 'lowtide[ao]'")
