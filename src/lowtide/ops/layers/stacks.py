"""Stacks: the weights of all experts of a layer in one parameter, [experts, out, in], or [experts, in, out] where a
family transposes them. They are no linear layers, and what quantizes linear layers leaves them as they are.

Here they are stored in few bits as matrices are: in NF4 or FP4 as a model is loaded with `load_in_4bit`
(`compat.bitsandbytes`), in FP8 by `base_dtype`. `engine.layers.experts` multiplies by them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lowtide.compat.bitsandbytes import dense_4_bit, in_4_bits, quant_state
from lowtide.compat.transformers import has_stacks, stack_names
from lowtide.ops.layers import float8
from lowtide.ops.layers.float8 import RowScaled

STAND_INS = "_lowtide_stand_ins"
"""The attribute of experts in a plan: by name, the stacks that stand for quantized ones."""


class StoredStack(NamedTuple):
    """A stack that is quantized."""

    shape: torch.Size
    """Of what it stands for."""
    dense: Callable[[torch.dtype], Tensor]
    """Makes it, in a dtype."""


def expert_stacks(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of weights that are those of all experts of a layer, and not quantized."""
    return [name for name, p in weights.items() if p.dim() == 3 and p.is_floating_point() and ".experts." in name]


def stored_stacks(module: nn.Module) -> dict[str, StoredStack]:
    """By name, the quantized stacks of a module; empty of what is no experts. Asked for at each use, since streamed
    weights come and go."""
    if not has_stacks(module):
        return {}
    found = {name: _stored(module, name) for name in stack_names(module)}
    return {name: stack for name, stack in found.items() if stack is not None}


def _stored(experts: nn.Module, name: str) -> StoredStack | None:
    if (rows := float8.stored(experts, name)) is not None:
        return StoredStack(rows.codes.shape, rows.dense)
    if (state := quant_state(experts, name)) is not None:
        return StoredStack(state.shape, partial(dense_4_bit, experts, name=name))
    return vars(experts).get(STAND_INS, {}).get(name)


def plain_stacks(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The stacks in a module that are not quantized, each by its experts and its name there."""
    experts = [each for each in module.modules() if has_stacks(each)]
    return [(each, name) for each in experts for name in stack_names(each) if _stored(each, name) is None]


def put_stack_in_float8(experts: nn.Module, name: str, device: torch.device) -> None:
    """Stores a stack in FP8, with a scale for each row of each expert's matrix; computed on a device, an expert at a
    time, stored where it was."""
    stack: Tensor = getattr(experts, name).detach()
    codes = torch.empty_like(stack, dtype=float8.FORMAT)
    scales = torch.empty((*stack.shape[:2], 1), dtype=torch.float32, device=stack.device)
    for number, matrix in enumerate(stack):
        codes[number], scales[number] = float8.in_rows(matrix.to(device))
    float8.store(experts, RowScaled(codes, scales), name)


def put_stack_in_4_bits(experts: nn.Module, name: str, device: torch.device) -> None:
    """Stores a stack in NF4 on a device."""
    stack: Tensor = getattr(experts, name)
    setattr(experts, name, in_4_bits(stack.data.to(device)))


def with_stacks(experts: nn.Module, stacks: Mapping[str, Tensor]) -> nn.Module:
    """The same experts with other stacks in the place of some, frozen; where those are quantized, these are what they
    stand for."""
    quantized, made = stored_stacks(experts), copy.copy(experts)
    frozen = {name: nn.Parameter(stack, requires_grad=False) for name, stack in stacks.items()}
    scales = {name + float8.SCALES for name in stacks}
    own = vars(made)
    own["_parameters"] = dict(experts.named_parameters(recurse=False)) | frozen
    own["_buffers"] = {name: each for name, each in experts.named_buffers(recurse=False) if name not in scales}
    own[STAND_INS] = {name: StoredStack(each.shape, each.to) for name, each in frozen.items() if name in quantized}
    return made


def added(stack: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A stack with `left @ right` added to each matrix, summed up in float32 at least; one expert at a time, beside
    which nothing of its size is made.

    Args:
        stack: [experts, rows, columns].
        left: [experts, rows, rank].
        right: [experts, rank, columns].
        dtype: of what is returned.
    """
    wide, made = torch.promote_types(dtype, torch.float32), torch.empty_like(stack, dtype=dtype)
    for out, matrix, *factors in zip(made, stack, left, right, strict=True):
        out.copy_(torch.addmm(matrix.to(wide), *(factor.to(wide) for factor in factors)))
    return made


@contextlib.contextmanager
def shapes_of_stacks(model: nn.Module) -> Iterator[None]:
    """While it lasts, quantized stacks have the shape of what they stand for, and no values: PEFT makes an adapter by
    it."""
    held = [
        (each, name, cast(Tensor, getattr(each, name)), stack.shape)
        for each in model.modules()
        for name, stack in stored_stacks(each).items()
    ]
    try:
        for experts, name, weight, shape in held:
            like = torch.empty(1, device=weight.device).expand(shape)
            setattr(experts, name, nn.Parameter(like, requires_grad=False))
        yield
    finally:
        for experts, name, weight, _ in held:
            setattr(experts, name, weight)
