"""Which weights may have their gradient added to `.grad` in place.

The fused head and the embedding add to `.grad` themselves, past autograd, which saves a second tensor of vocab x
hidden. A hook on the weight would then never be called, so a weight with a hook of any kind goes through autograd.
Hooks that C++ puts on the weight's `AccumulateGrad` node, as DistributedDataParallel does, cannot be seen from Python.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lowtide.compat.torch import has_gradient_hooks


def takes_gradient_in_place(weight: Tensor) -> bool:
    """Whether a weight is a leaf that needs a gradient, and nobody waits for autograd to bring it."""
    if torch.is_inference_mode_enabled() or not (weight.requires_grad and weight.is_leaf):
        return False
    return not (has_gradient_hooks(weight) or _node_is_hooked(weight))


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
