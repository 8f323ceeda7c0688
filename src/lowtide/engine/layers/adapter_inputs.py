"""Adapters take activations as they come, where autocast computes in their dtype.

PEFT keeps adapters in float32 over a base in half precision, and widens what comes to each adapted layer to that. Then
autocast rounds it again for the product, and keeps that copy for backward. So the projections of queries, keys and
values each keep a copy of one input, beside a float32 one while it is made. Taken as it comes, it is kept once.

Exact: what was widened is rounded to what it was.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowtide.compat.peft import cast_unless
from lowtide.ops.target import autocast_dtype, kind_of


def install_adapter_inputs(model: nn.Module) -> None:
    """For the LoRA layers of a model."""
    cast_unless(model, _is_as_autocast_wants)


def _is_as_autocast_wants(layer: Any, x: Tensor) -> bool:
    """Whether a product with an adapter's weight would round the activations, widened, to what they are.

    A CPU scales what dropout keeps in the activations' own dtype, which would round the scale; a GPU does in float32.
    """
    if x.dtype != autocast_dtype(x.device):
        return False
    drops = layer.training and any(getattr(each, "p", 0.0) > 0 for each in layer.lora_dropout.values())
    return not drops or x.is_cuda or kind_of(x.device) == "cuda"
