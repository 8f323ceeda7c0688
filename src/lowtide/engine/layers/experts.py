"""Routed experts whose weights have adapters, or are stored in few bits.

The weights of a layer's experts are one parameter, a stack [experts, out, in]. PEFT adapts it (`target_parameters`) by
adding `B A` of every expert to it in each forward: a second stack, whose gradient is a third one. Here each expert's
tokens go through `x W' + (x A') B'` in products grouped by expert, so that beside the weights nothing of their size is
made. On a CPU no expert's inputs and outputs are made for all tokens either (`ops.layers.adapted_experts`). A stack
that is quantized (`ops.layers.stacks`) is made dense for one product at a time, in forward and once more in backward.

Exact: it is the same sum in another order. PEFT's own way is left where experts are computed by a function that takes
no groups (`experts_implementation`), where adapters are merged, and where several are on at once; quantized stacks are
always computed in groups.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.compat.peft import StackLora, adapted_stacks, stack_loras
from lowtide.compat.transformers import (
    are_two_products,
    between_products,
    grouped_experts,
    grouped_product,
    has_stacks,
    run_in_groups,
    stack_names,
)
from lowtide.ops.layers.adapted_experts import AdaptedStack, Pairs, summed_over_experts, taken_by_experts
from lowtide.ops.layers.stacks import StoredStack, stored_stacks, with_stacks
from lowtide.ops.target import autocast_dtype, kind_of

LORAS = "lowtide_loras"
"""The keyword argument by which experts are given the adapters of their weights."""
ALIGNED = 16
"""Bytes of which a GPU's grouped products want each row of a factor to be a multiple."""


def install_experts(model: nn.Module, *, quantized_alone: bool = False) -> None:
    """For the experts of a model that have adapters, or are quantized, which nothing else computes."""
    for layer in adapted_stacks(model):
        experts: Any = layer.get_base_layer()
        if stored_stacks(experts) or (has_stacks(experts) and not quantized_alone):
            layer.forward = types.MethodType(_adapted_forward, layer)
            experts.forward = types.MethodType(run_experts, experts)
    for module in model.modules():
        if stored_stacks(module):
            module.forward = types.MethodType(run_experts, module)


def experts_by(experts: nn.Module, stacks: Mapping[str, Tensor]) -> nn.Module:
    """What computes as experts do, without gradients, with other stacks in the place of some of theirs: of quantized
    ones what they stand for, of others with adapters what they are together.

    Args:
        experts: which have adapters around them, or are quantized, after `install_experts`.
        stacks: by the names of theirs, and as these lie.
    """
    made = with_stacks(experts, stacks)
    made.forward = types.MethodType(run_experts, made)
    return made


def _adapted_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of PEFT's outermost layer around experts."""
    experts = self.get_base_layer()
    stored = bool(stored_stacks(experts))
    loras = stack_loras(self) if (stored or run_in_groups(experts)) and not kwargs else None
    if loras is None and stored:
        raise ValueError(
            "the weights of routed experts are quantized, and their adapters are merged into them or several are on "
            "at once: have one on, unmerged"
        )
    if loras is None:
        return type(self).forward(self, *args, **kwargs)
    return experts(*args, **({LORAS: loras} if loras else {}))


def run_experts(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What the forward of experts computes; of those that are neither adapted nor quantized, their class's."""
    loras, stored = kwargs.pop(LORAS, {}), stored_stacks(self)
    if not loras and not stored:
        return type(self).forward(self, *args, **kwargs)
    if not stored and _on_a_cpu(self):
        return _one_after_the_other(self, loras, *args, **kwargs)
    return grouped_experts(_product)(_Experts(self, loras, stored), *args, **kwargs)


class _Stack(NamedTuple):
    weight: Tensor | StoredStack
    lora: StackLora | None


class _Experts:
    """Experts as their forward sees them: weights with their adapters, quantized ones with what makes them dense."""

    def __init__(self, experts: nn.Module, loras: dict[str, StackLora], stored: dict[str, StoredStack]) -> None:
        self.experts = experts
        self.stacks = {
            name: _Stack(stored.get(name) or getattr(experts, name), loras.get(name)) for name in {**loras, **stored}
        }

    def __getattr__(self, name: str) -> Any:
        return self.stacks.get(name) or getattr(self.experts, name)


def _product(
    x: Tensor, weight: Tensor | _Stack, ends: Tensor, bias: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    """[rows, in] in groups that end at `ends` to [rows, out]."""
    if isinstance(weight, Tensor):
        return grouped_product(x, weight, ends, bias, transposed=is_transposed)
    if isinstance(weight.weight, Tensor):
        out = grouped_product(x, weight.weight, ends, bias, transposed=is_transposed)
    else:
        out = _QuantizedProduct.apply(x.to(autocast_dtype(x.device) or x.dtype), weight.weight, ends, is_transposed)
        out = out if bias is None else out + bias.to(out.dtype)
    if weight.lora is None:
        return out
    left, right = (factor.to(out.dtype) for factor in weight.lora)
    lacking = -right.shape[1] % (ALIGNED // out.itemsize)  # ranks of zeros
    left, right = F.pad(left, (0, lacking)), F.pad(right, (0, 0, 0, lacking))
    first, second = (left, right) if is_transposed else (right, left)
    low = grouped_product(x, first.contiguous(), ends, transposed=is_transposed)
    return out + grouped_product(low, second.contiguous(), ends, transposed=is_transposed)


def _on_a_cpu(experts: Any) -> bool:
    """Whether the weights of experts are frozen, and they compute on a CPU what `_one_after_the_other` does."""
    stacks = (getattr(experts, name) for name in stack_names(experts))
    return are_two_products(experts) and not any(each.requires_grad or kind_of(each.device) != "cpu" for each in stacks)


def _one_after_the_other(
    experts: Any, loras: dict[str, StackLora], x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """What transformers' forward of experts in groups computes, for one expert after the other.

    What an expert gives is linear in what its second product takes. So the token's weight of the expert multiplies
    that, which is narrower.
    """
    by_expert, order = chosen.flatten().sort()
    ends = torch.searchsorted(by_expert, torch.arange(1, experts.num_experts + 1, device=x.device))
    pairs = Pairs(order // chosen.shape[1], ends)
    first, second = (_adapted_stack(experts, name, loras.get(name)) for name in stack_names(experts))
    made = taken_by_experts(x.to(first.weight.dtype), first, pairs)
    if experts.has_bias:
        made = made + getattr(experts, f"{stack_names(experts)[0]}_bias")[by_expert]
    made = between_products(experts, made)
    made = made * weights.flatten()[order, None].to(made.dtype)
    out = summed_over_experts(made, second, pairs, x.shape[0])
    if experts.has_bias:
        shares = weights.new_zeros(x.shape[0], experts.num_experts).scatter_add(1, chosen, weights)
        out = out + shares.to(out.dtype) @ experts.down_proj_bias
    return out.to(x.dtype)


def _adapted_stack(experts: Any, name: str, lora: StackLora | None) -> AdaptedStack:
    stack: Tensor = getattr(experts, name)
    if lora is None:
        lora = StackLora(stack.new_empty(*stack.shape[:2], 0), stack.new_empty(stack.shape[0], 0, stack.shape[2]))
    left, right = (factor.to(stack.dtype) for factor in lora)
    first, second = (left, right) if experts.is_transposed else (right.mT, left.mT)
    weight = stack if experts.is_transposed else stack.mT
    return AdaptedStack(weight, first.contiguous(), second.contiguous())  # products would copy them


class _QuantizedProduct(torch.autograd.Function):
    """Rows in groups times a frozen quantized stack; what is kept for backward are the ends of groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: StoredStack, ends: Tensor, transposed: bool) -> Tensor:
        ctx.stack, ctx.ends, ctx.transposed = stack, ends, transposed
        return grouped_product(x, stack.dense(x.dtype), ends, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        stack = ctx.stack.dense(grads[0].dtype)
        return grouped_product(grads[0], stack, ctx.ends, transposed=not ctx.transposed), None, None, None
