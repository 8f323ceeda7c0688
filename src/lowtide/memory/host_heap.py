"""Gives freed host memory back to the system while a CPU trains.

Each layer frees tensors of a few megabytes between others that stay. glibc keeps such holes in its heap, and the next
layer's tensors rarely fit them: the resident peak grows with every layer of a large model, although nothing holds that
memory. Trimming whenever the holes add up costs about a percent of the time there, and nothing
where they do not. Exact: no value is touched. On CUDA and on systems without glibc it does nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

TRIM_ABOVE = 40 << 20
"""Free bytes inside the heap that are worth a trim."""


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def trim_while_training(model: nn.Module) -> bool:
    """Lets each layer of a model on the CPU look at the heap as its forward and its backward begin, and trim it.

    Args:
        model: its lists of layers are found by their type.

    Returns:
        whether there is a heap to trim.
    """
    trim = _trimmer()
    if trim is None or any(p.device.type != "cpu" for p in model.parameters()):
        return False

    def before_forward(_layer: nn.Module, _inputs: object) -> None:
        trim()

    def after_forward(_layer: nn.Module, _inputs: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(before_backward)

    def before_backward(_gradient: Tensor) -> None:
        trim()

    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for layer in layers:
            layer.register_forward_pre_hook(before_forward)
            layer.register_forward_hook(after_forward)
    return True


def _trimmer() -> Callable[[], None] | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallinfo2.restype = _MallocInfo
    except (OSError, AttributeError):
        return None

    def trim() -> None:
        if libc.mallinfo2().fordblks > TRIM_ABOVE:
            libc.malloc_trim(0)

    return trim
