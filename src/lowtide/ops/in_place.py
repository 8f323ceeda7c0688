"""Which weights may have their gradient added to `.grad` in place.

The fused head and the embedding add to `.grad` themselves, past autograd, which saves a second tensor of vocab x
hidden. A hook on the weight would then never be called, so a weight with a hook of any kind goes through autograd.
Hooks that C++ puts on the weight's `AccumulateGrad` node, as DistributedDataParallel does, cannot be seen from Python.

Where the head's gradient is on its way through autograd, a tied embedding's rows are added to it as it arrives: a
dense gradient of theirs and the sum of both would be two more tensors of vocab x hidden.

A weight may be a `DTensor`, of which a part lies here; what is added to is the part of its `.grad` that lies here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.compat.torch import backward_number, has_gradient_hooks, has_tensor_hooks
from lowtide.ops.target import target_of


def needs_gradient(weight: Tensor) -> bool:
    """Whether a weight is a leaf that needs a gradient."""
    return weight.requires_grad and weight.is_leaf and not torch.is_inference_mode_enabled()


def takes_gradient_in_place(weight: Tensor) -> bool:
    """Whether a weight is a leaf that needs a gradient, and nobody waits for autograd to bring it."""
    return needs_gradient(weight) and not (has_gradient_hooks(weight) or _node_is_hooked(weight))


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


@dataclass
class _Arrival:
    """A gradient of all of a weight that a backward brings."""

    backward: int
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """What is added to it once it is there."""


_arrivals = WeakIdKeyDictionary()
"""By weight."""


def announce(weight: Tensor) -> None:
    """Says in a backward that it brings a gradient of all of a leaf."""
    if not has_tensor_hooks(weight) and not _arrives(weight):  # others' hooks would see it before it is complete
        _arrivals[weight] = _Arrival(backward_number())


def add_rows_on_arrival(
    weight: Float[Tensor, "all hidden"], rows: Int[Tensor, " some"], grad: Float[Tensor, "some hidden"]
) -> bool:
    """Adds to some rows of a gradient that was announced, once autograd has all of it; returns whether one was."""
    if not _arrives(weight):
        return False
    arrival: _Arrival = _arrivals[weight]
    arrival.rows.append((rows, grad))
    if len(arrival.rows) > 1:
        return True

    def arrived(whole: Tensor) -> None:
        handle.remove()
        waiting, arrival.rows = arrival.rows, []
        if backward_number() == arrival.backward:  # else it is that of a later one, since this one failed
            for rows, grad in waiting:
                add_rows(whole, rows, grad)

    handle = weight.register_hook(arrived)
    return True


def _arrives(weight: Tensor) -> bool:
    """Whether this backward brings a gradient of all of a weight."""
    arrival = _arrivals.get(weight)
    return arrival is not None and arrival.backward == backward_number()


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
