"""How a frozen reference is stored: as it is, in 8 or 4 bits, or in host memory and brought layer by layer.

Weights alone are quantized, and those of the layers alone: embeddings and head stay as they are, so that the fused
head reads them. 8 bits are torchao's (one scale a row), 4 bits are bitsandbytes' (NF4, arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lowtide.engine.forward import causal_model
from lowtide.ops.layers.stacks import plain_stacks, put_stack_in_4_bits


def as_it_is(model: nn.Module, device: torch.device) -> None:
    """The dtype that the weights have."""
    model.to(device)


def in_8_bits(model: nn.Module, device: torch.device) -> None:
    """The layers' weights as integers of 8 bits. Not exact: the reference's log-probabilities move a little."""
    _needs("torchao", "ao", "8bit")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model.to(device)
    for layers in layer_lists(model):
        quantize_(layers, Int8WeightOnlyConfig())


def in_4_bits(model: nn.Module, device: torch.device) -> None:
    """The layers' weights as NF4. Not exact: the reference's log-probabilities move."""
    _needs("bitsandbytes", "bnb", "4bit")
    for layers in layer_lists(model):
        _replace_linears(layers, device)
        for experts, name in plain_stacks(layers):
            put_stack_in_4_bits(experts, name, device)
    model.to(device)


def in_host_memory(model: nn.Module, device: torch.device) -> None:
    """The layers' weights on the host; each is brought to the device for its own forward. Exact."""
    from accelerate import cpu_offload

    if device.type == "cpu":
        raise ValueError(
            "ref_model_storage='cpu' keeps the reference in host memory, where the policy is too: leave it at 'same'"
        )
    offloaded = {id(module) for layers in layer_lists(model) for module in layers.modules()}
    for module in model.modules():
        if id(module) not in offloaded:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
    for layers in layer_lists(model):
        for layer in layers:
            cpu_offload(layer, execution_device=device)


STORAGES: dict[str, Callable[[nn.Module, torch.device], None]] = {
    "same": as_it_is,
    "8bit": in_8_bits,
    "4bit": in_4_bits,
    "cpu": in_host_memory,
}
"""The variants of `ref_model_storage`."""


def layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of layers of a model; not those inside of layers."""
    found: list[nn.ModuleList] = []
    for module in causal_model(model).modules():
        if isinstance(module, nn.ModuleList) and not any(module in list(outer.modules()) for outer in found):
            found.append(module)
    return found


def _replace_linears(module: nn.Module, device: torch.device) -> None:
    from bitsandbytes import nn as bitsandbytes

    layers: Any = bitsandbytes
    for name, child in list(module.named_children()):
        if type(child) is not nn.Linear:
            _replace_linears(child, device)
            continue
        bias = child.bias is not None
        linear: Any = layers.Linear4bit(
            child.in_features, child.out_features, bias, compute_dtype=child.weight.dtype, quant_type="nf4"
        )
        linear.support_avx512bf16_for_cpu = False  # its repacked form takes only some sizes, and rounds the scales
        linear.weight = layers.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
        if bias:
            linear.bias = child.bias
        setattr(module, name, linear.to(device))


def _needs(package: str, extra: str, storage: str) -> None:
    if find_spec(package) is None:
        raise ValueError(
            f"ref_model_storage={storage!r} needs {package}, which is not installed: pip install 'lowtide[{extra}]'"
        )
