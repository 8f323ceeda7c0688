"""Cuts a model's weights into parts, one a rank, by DeepSpeed's ZeRO-3.

Each module gathers its own parameters for its forward and its backward, so heads and embedding run as calls of their
own modules, with what the engine replaces in them installed before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.compat.deepspeed import is_partitioned, partition, staying_gathered
from lowtide.engine.forward import install
from lowtide.engine.weights.quantized import check_sendable, is_quantized
from lowtide.engine.weights.sharded import fully_shard
from lowtide.ops.layers import float8
from lowtide.ranks.shards import whole_shape

UNDO = "_lowtide_undo_partition"
"""The attribute of a model that takes the gathering out of its modules, for an engine that steps it."""


def partition_model(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Leaves on each rank its part of a model's weights, on `device` or where the config offloads them; all ranks call
    it together.

    Args:
        model: whole on each rank, wrapped by PEFT or not. Ranks whose weights differ get those of the first.
        config: of DeepSpeed, of stage 3.

    Raises:
        ValueError: weights are quantized otherwise than in FP8.
    """
    check_sendable(model)
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(path, recurse=False):
            if is_quantized(weight) and float8.stored(module, name.rpartition(".")[2]) is None:
                raise ValueError(
                    f"ZeRO-3 cuts plain numbers and FP8's bytes, and {name} is quantized otherwise: take "
                    "base_dtype='float8', stage 2, which leaves weights whole, or FSDP2 (fsdp=True)"
                )
    install(model, padding_free=False)
    vars(model)[UNDO] = partition(model, config, device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


@contextlib.contextmanager
def weights_for_writing(model: nn.Module, gather: bool | int) -> Iterator[None]:
    """As `fully_shard.weights_for_writing`, and the same for the parameters of ZeRO-3."""
    parameters = [p for p in model.parameters() if is_partitioned(p)]
    if not parameters:
        with fully_shard.weights_for_writing(model, gather):
            yield
        return
    most, held = math.inf if gather is True else int(gather), []
    for parameter in parameters:
        most -= whole_shape(parameter).numel() * parameter.element_size()
        if most < 0:
            break
        held.append(parameter)
    together = nullcontext() if len(held) == len(parameters) else fully_shard.until_all_end(model)
    with staying_gathered(held) if held else nullcontext(), together:
        yield


def stop_gathering(model: nn.Module) -> None:
    """Before another engine takes a partitioned model: it brings what gathers with it."""
    undo = vars(model).pop(UNDO, None)
    if undo is not None:
        undo()
