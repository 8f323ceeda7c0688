"""Compiles each layer of a model by itself, for batches whose number of tokens is another one each time.

Layers are alike, so what is compiled for one serves them all (regional compilation, as in PyTorch's recipe of that
name), and what stands between them stays as it is: the embedding and the fused head add gradients in place, which no
graph should hold. The number of tokens is a symbol in the graphs. Attention is left out of them, in one break a layer:
its groups of segments differ from batch to batch, and its kernels are fused already. What gains is what lies between:
norms, rotary embeddings, activations and residuals, which are read and written once, and of which fewer are kept.

Equal to rounding: a compiler sums in another order, and keeps float32 where the model rounds between two operations.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.compat.torch import activation_budget, is_left_out_of_graphs
from lowtide.compat.transformers import attention_implementation, holds_cache, plain_forward, run_checkpointed


def compile_layers(
    model: nn.Module, *, backend: str = "inductor", mode: str | None = None, budget: float | None = None
) -> int:
    """Has the layers of a model compiled when they first run.

    Args:
        model: of transformers, wrapped or not, after `engine.forward.install` and after adapters are on it;
            checkpointing may be set before or after.
        backend: of `torch.compile`.
        mode: of `torch.compile`, such as "max-autotune-no-cudagraphs".
        budget: share of its activations that a graph may keep for backward, by a backend among `PARTITIONED`; the
            compiler picks what is the cheapest to compute again. None: all that it finds worth keeping.

    Returns:
        How many layers are compiled.

    Raises:
        ValueError: transformers knows no layers in this model.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(f"transformers knows no layers of this model (model type {kind}): leave torch_compile off")
    _leave_attention_out(model)
    _leave_dropout_out(model)
    for layer in layers:
        plain = plain_forward(layer)
        compiled: Callable[..., Any] = torch.compile(plain, backend=backend, mode=mode, dynamic=True)
        if budget is not None:
            compiled = functools.partial(_within, budget, compiled)
        # Older versions of transformers checkpoint around the call of a layer, newer ones inside of its forward.
        inside = plain is not type(layer).forward
        layer.forward = types.MethodType(functools.partial(_checkpointed, compiled) if inside else compiled, layer)
        layer.compiled_here = True
    return len(layers)


def _within(budget: float, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A compiled forward, whose graphs are made when it first runs, with a budget for what they keep."""
    with activation_budget(budget):
        return compiled(*args, **kwargs)


def remove_compilation(model: nn.Module) -> None:
    """Undoes `compile_layers`."""
    for module in model.modules():
        if module.__dict__.pop("compiled_here", False):
            del module.forward


def _checkpointed(compiled: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward. No graph can break inside of a checkpoint, so the compiled one is what is checkpointed."""
    if not (layer.gradient_checkpointing and layer.training):
        return compiled(layer, *args, **kwargs)
    if holds_cache(kwargs):
        return type(layer).forward(layer, *args, **kwargs)  # which knows what to do with a cache
    return run_checkpointed(layer, functools.partial(compiled, layer, **kwargs), *args)


def _leave_attention_out(model: nn.Module) -> None:
    """Has graphs break at the attention function that the model's layers look up."""
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for inner in model.modules():
        name: Any = attention_implementation(getattr(inner, "config", None))
        if isinstance(inner, PreTrainedModel) and name in ALL_ATTENTION_FUNCTIONS:
            function = ALL_ATTENTION_FUNCTIONS[name]
            if not is_left_out_of_graphs(function):
                AttentionInterface.register(name, torch.compiler.disable(function))


def _leave_dropout_out(model: nn.Module) -> None:
    """Has graphs break at dropouts of `engine.layers.dropout`, whose bits no graph can draw again."""
    dropouts: list[Any] = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        forward = module.__dict__.get("forward")
        if forward is not None and not is_left_out_of_graphs(forward):
            module.forward = torch.compiler.disable(forward)
