"""Lets a model's dropouts draw their bits again in backward on a CPU, in place of keeping them (see `ops.dropout`)."""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn

from lowtide.ops.dropout import dropout, drops_here


def install_dropout(model: nn.Module) -> None:
    """Replaces the forward of the dropouts that are torch's own."""
    for module in model.modules():
        if type(module) is nn.Dropout and not module.inplace:
            module.forward = types.MethodType(_forward, module)


def _forward(self: Any, input: Tensor) -> Tensor:
    if self.training and drops_here(input, self.p):
        return dropout(input, self.p)
    return nn.Dropout.forward(self, input)
