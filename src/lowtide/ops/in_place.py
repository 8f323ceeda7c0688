"""Which weights may have their gradient added to `.grad` in place.

The fused head and the embedding add to `.grad` themselves, past autograd, which saves a second tensor of vocab x
hidden. A hook on the weight would then never be called, so a weight with a hook of any kind goes through autograd.
Hooks on the weight's `AccumulateGrad` node, which DistributedDataParallel registers, cannot be seen from Python.
"""

from __future__ import annotations

from torch import Tensor

from lowtide.compat.torch import has_gradient_hooks


def takes_gradient_in_place(weight: Tensor) -> bool:
    """Whether a weight is a leaf that needs a gradient, and nobody waits for autograd to bring it."""
    return weight.requires_grad and weight.is_leaf and not has_gradient_hooks(weight)
