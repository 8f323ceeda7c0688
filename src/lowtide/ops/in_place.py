"""Which weights may have their gradient added to `.grad` in place.

The fused head and the embedding add to `.grad` themselves, past autograd, which saves a second tensor of vocab x
hidden. A hook on the weight would then never be called, so a weight with a hook of any kind goes through autograd.
Hooks that C++ puts on the weight's `AccumulateGrad` node, as DistributedDataParallel does, cannot be seen from Python.

A weight may be a `DTensor`, of which a part lies here; what is added to is the part of its `.grad` that lies here.
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from lowtide.compat.torch import has_gradient_hooks
from lowtide.ops.target import target_of


def takes_gradient_in_place(weight: Tensor) -> bool:
    """Whether a weight is a leaf that needs a gradient, and nobody waits for autograd to bring it."""
    if torch.is_inference_mode_enabled() or not (weight.requires_grad and weight.is_leaf):
        return False
    return not (has_gradient_hooks(weight) or _node_is_hooked(weight))


def lies_here(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, without a copy and without gradient; a plain one as it is."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def lying_as(weight: Tensor | None, part: Tensor) -> Tensor:
    """A tensor of which the part that lies here is given, and that is cut as a weight is; the part, if none is cut."""
    if not isinstance(weight, DTensor):
        return part
    how = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(part, weight.device_mesh, weight.placements, **how)


def gradient_in_place(weight: Tensor) -> Tensor:
    """The part of a weight's `.grad` that lies here, to add to; of zeros, where the weight has none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return lies_here(weight.grad)


def add_rows(into: Float[Tensor, "all hidden"], rows: Int[Tensor, " some"], grad: Float[Tensor, "some hidden"]) -> None:
    """Adds to some rows of a tensor; a row may come several times."""
    grad = grad.to(into.dtype)
    if target_of(grad).kind == "cuda":  # sorts, where index_add_ would add in any order
        into.index_put_((rows,), grad, accumulate=True)
    else:
        into.index_add_(0, rows, grad)


def _node_is_hooked(weight: Tensor) -> bool:
    """Whether Python code put a hook on the node that adds a leaf's gradient to `.grad`.

    A node does not list its hooks. Those of one kind share a dict, which a handle of a further one leads to.
    """
    node = get_gradient_edge(weight).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*_: object) -> None:
    """A hook that changes nothing."""
