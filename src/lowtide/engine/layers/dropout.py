"""Lets a model's dropouts draw their bits again in backward on a CPU, in place of keeping them (see `ops.dropout`)."""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn

from lowtide.ops.dropout import dropout, drops_here


def install_dropout(model: nn.Module) -> None:
    """Replaces the forward of the dropouts that are torch's own, where nothing else has."""
    for module in model.modules():
        if type(module) is nn.Dropout and not module.inplace and "forward" not in vars(module):
            module.forward = types.MethodType(drop, module)


def drop(self: Any, input: Tensor) -> Tensor:
    """What the forward of a dropout computes."""
    if self.training and drops_here(input, self.p):
        return dropout(input, self.p)
    return nn.Dropout.forward(self, input)
