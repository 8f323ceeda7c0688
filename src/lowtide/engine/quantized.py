"""What quantized bases need so that adapters on them train with the right gradients.

A weight is quantized where it is not the tensor that its layer multiplies by: bitsandbytes stores bytes beside a state,
torchao a tensor subclass. Their own layers know how to multiply, and carry gradients to their inputs. Two things have
to be kept from them: the fused head, which multiplies by the weight itself; and, on a CPU, a repacking of 4-bit weights
in the first evaluation, after which bitsandbytes has no gradient any more and says so in a warning alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is stored otherwise than as the numbers that it stands for."""
    return not weight.is_floating_point() or type(weight).__module__.startswith("torchao.")


def keep_trainable(model: nn.Module) -> None:
    """Has 4-bit layers of bitsandbytes on a CPU keep the form that gradients pass through.

    Raises:
        ValueError: a layer was repacked for inference already.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        layer: Any = module
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"the 4-bit weight of {name} was repacked for inference, as bitsandbytes does on a CPU when a model is "
                "called in eval mode; no gradient passes through it. Load the model anew, and hand it over uncalled"
            )
        layer.support_avx512bf16_for_cpu = False
