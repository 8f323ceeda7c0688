"""Cuts a model's weights into parts, one a rank, by DeepSpeed's ZeRO-3.

Each module gathers its own parameters for its forward and its backward, so heads and embedding run as calls of their
own modules, with what the engine replaces in them installed before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.compat.deepspeed import partition
from lowtide.engine.forward import install

UNDO = "_lowtide_undo_partition"
"""The attribute of a model that takes the gathering out of its modules, for an engine that steps it."""


def partition_model(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Leaves on each rank its part of a model's weights, on `device` or where the config offloads them; all ranks call
    it together.

    Args:
        model: whole on each rank, wrapped by PEFT or not. Ranks whose weights differ get those of the first.
        config: of DeepSpeed, of stage 3.
    """
    install(model, padding_free=False)
    vars(model)[UNDO] = partition(model, config, device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def stop_gathering(model: nn.Module) -> None:
    """Before another engine takes a partitioned model: it brings what gathers with it."""
    undo = vars(model).pop(UNDO, None)
    if undo is not None:
        undo()
