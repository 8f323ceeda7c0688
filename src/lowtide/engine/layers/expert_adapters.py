"""Adapters of routed experts run beside their weights, token by token, as those of other layers do.

The weights of a layer's experts are one parameter, [experts, out, in]. PEFT adapts it (`target_parameters`) by adding
`B A` of every expert to it in each forward: a second stack, whose gradient is a third one. Here each expert's tokens
go through `x W' + (x A') B'` in products grouped by expert, so that beside the weights nothing of their size is made.

Exact: it is the same sum in another order. PEFT's own way is left where experts are computed by a function that takes
no groups (`experts_implementation`), where adapters are merged, and where several are on at once.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.compat.peft import StackLora, adapted_stacks, stack_loras
from lowtide.compat.transformers import grouped_experts, grouped_product, run_in_groups

LORAS = "lowtide_loras"
"""The keyword argument by which experts are given the adapters of their weights."""
ALIGNED = 16
"""Bytes of which a GPU's grouped products want each row of a factor to be a multiple."""


def install_expert_adapters(model: nn.Module) -> None:
    """For the experts of a model that have adapters."""
    for layer in adapted_stacks(model):
        experts: Any = layer.get_base_layer()
        if hasattr(experts, "is_transposed"):
            layer.forward = types.MethodType(_adapted_forward, layer)
            experts.forward = types.MethodType(_experts_forward, experts)


def _adapted_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of PEFT's outermost layer around experts."""
    experts = self.get_base_layer()
    loras = stack_loras(self) if run_in_groups(experts) and not kwargs else None
    if loras is None:
        return type(self).forward(self, *args, **kwargs)
    return experts(*args, **({LORAS: loras} if loras else {}))


def _experts_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    loras = kwargs.pop(LORAS, None)
    if loras is None:
        return type(self).forward(self, *args, **kwargs)
    return grouped_experts(_product)(_Experts(self, loras), *args, **kwargs)


class _Adapted(NamedTuple):
    stack: Tensor
    lora: StackLora


class _Experts:
    """Experts as their forward sees them: a weight with an adapter comes with it."""

    def __init__(self, experts: nn.Module, loras: dict[str, StackLora]) -> None:
        self.experts, self.loras = experts, loras

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.experts, name)
        return _Adapted(found, self.loras[name]) if name in self.loras else found


def _product(
    x: Tensor, weight: Tensor | _Adapted, ends: Tensor, bias: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    """[rows, in] in groups that end at `ends` to [rows, out]."""
    if isinstance(weight, Tensor):
        return grouped_product(x, weight, ends, bias, transposed=is_transposed)
    out = grouped_product(x, weight.stack, ends, bias, transposed=is_transposed)
    left, right = (factor.to(out.dtype) for factor in weight.lora)
    lacking = -right.shape[1] % (ALIGNED // out.itemsize)  # ranks of zeros
    left, right = F.pad(left, (0, lacking)), F.pad(right, (0, 0, 0, lacking))
    first, second = (left, right) if is_transposed else (right, left)
    low = grouped_product(x, first.contiguous(), ends, transposed=is_transposed)
    return out + grouped_product(low, second.contiguous(), ends, transposed=is_transposed)
