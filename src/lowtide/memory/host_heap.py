"""Gives freed host memory back to the system while a CPU trains.

A backward pass frees tensors of a few megabytes between gradients that stay. glibc keeps such holes in its heap, and
the next layer's tensors rarely fit them: the resident peak grows by some 20 MB a layer of a 0.5B model, although
nothing holds that memory. Trimming whenever the holes add up costs half a percent of the time there, and nothing
where they do not. Exact: no value is touched. On CUDA and on systems without glibc it does nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import nn

TRIM_ABOVE = 96 << 20
"""Free bytes inside the heap that are worth a trim."""


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def trim_while_training(model: nn.Module) -> bool:
    """Lets each layer of a model on the CPU look at the heap as its gradients arrive, and trim it.

    Args:
        model: its lists of layers are found by their type; one trained parameter a layer carries the hook.

    Returns:
        whether there is a heap to trim.
    """
    trim = _trimmer()
    if trim is None or any(p.device.type != "cpu" for p in model.parameters()):
        return False
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for layer in layers:
            parameter = next((p for p in layer.parameters() if p.requires_grad), None)
            if parameter is not None:
                parameter.register_post_accumulate_grad_hook(trim)
    return True


def _trimmer() -> Callable[[torch.Tensor], None] | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallinfo2.restype = _MallocInfo
    except (OSError, AttributeError):
        return None

    def trim(_: torch.Tensor) -> None:
        if libc.mallinfo2().fordblks > TRIM_ABOVE:
            libc.malloc_trim(0)

    return trim
