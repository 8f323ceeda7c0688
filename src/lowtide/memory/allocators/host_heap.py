"""Keeps the heap of a process that trains on a CPU small where that pays, and steady where it does not.

glibc gives freed memory back to the system as soon as it lies at the heap's end, and the next tensor takes it again a
page at a time: a small model spends a quarter of its step on that. So the heap is told to keep what it has. But each
layer also frees tensors of a few megabytes between others that stay, and the next layer's rarely fit into such holes:
the resident peak of a large model grows with every layer, although nothing holds that memory. There the holes are
given back where they add up, while the process is near the most that it ever held: below that, to keep them costs
nothing, and to take them anew a quarter of a step. Where weights come and go between ranks, layers of a small model
do both: they give holes back, and what is whole for a moment, as a head is, is mapped by itself. The most is held
beside the head there, so holes are given back before it in any case.

Exact: no value is touched. On CUDA and on systems without glibc it does nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lowtide.memory.allocators.measure import peak_resident_bytes, resident_bytes
from lowtide.ranks.shards import whole_shape

LARGE = 1 << 28
"""Bytes of weights from which holes are given back, be they half a billion in four bits; below, they are small beside
what the imports hold."""
TRIM_ABOVE = 24 << 20
"""Free bytes inside the heap that are worth a trim."""
NEAR = 1 / 16
"""The share of the most that the process ever held, within which it is near that: more than a layer takes anew before
the next one looks."""
MMAP_ABOVE = 4 << 20
"""Bytes from which a tensor is mapped by itself, and leaves no hole: a twentieth slower for a quarter less."""
MMAP_ABOVE_OF_LARGE = 64 << 20
"""The same for a large model, whose holes are given back."""
M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = 1, -1, -3
"""Numbers of `mallopt`'s parameters."""


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def settle_heap(model: nn.Module, *, gathers: bool = False) -> bool:
    """Sets the heap of this process up for a model on the CPU, and lets the layers of a large one trim it.

    Args:
        model: its lists of layers are found by their type; each looks as its forward and its backward begin.
        gathers: each layer takes and frees memory for its weights or gradients on their way between ranks, so that it
            pays for a small model too.

    Returns:
        whether its layers trim: as each begins, and when the last has ended, forward and backward.
    """
    parameters = list(model.parameters())
    heap = glibc()
    if heap is None or any(p.device.type != "cpu" for p in parameters):
        return False
    heap.mallopt(M_MXFAST, 0)  # slivers between tensors are parts of the holes again, see `allocator`
    large = sum(whole_shape(p).numel() * p.element_size() for p in parameters) >= LARGE
    heap.mallopt(M_MMAP_THRESHOLD, MMAP_ABOVE_OF_LARGE if large else MMAP_ABOVE)
    heap.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if gathers:
        trim_in_layers(model, trim_heap, before_head=functools.partial(trim_heap, near=1))
    elif large:
        trim_in_layers(model, trim_heap)
    return large or gathers


def trim_heap(near: float | None = None) -> None:
    """Gives the heap's holes back to the system, if they add up and the process is near the most that it ever held;
    without glibc it does nothing.

    Args:
        near: the share of that within which it is near, 1 for always; by default `NEAR`.
    """
    heap = glibc()
    if heap is None or heap.mallinfo2().fordblks <= TRIM_ABOVE:
        return
    if resident_bytes() >= peak_resident_bytes() * (1 - (NEAR if near is None else near)):
        heap.malloc_trim(0)


def trim_in_layers(
    model: nn.Module, trim: Callable[[], None], *, before_head: Callable[[], None] | None = None
) -> None:
    """Has the layers of a model trim the heap as each begins, forward and backward, and as the last has ended.

    Args:
        before_head: in place of `trim`, when the last has run forward.
    """
    trim_before_head = before_head or trim

    def before_forward(_layer: nn.Module, _inputs: object) -> None:
        trim()

    def after_forward(_layer: nn.Module, _inputs: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(before_backward)

    def before_backward(_gradient: Tensor) -> None:
        trim()

    def after_layers(_layer: nn.Module, _inputs: object, _output: object) -> None:
        trim_before_head()

    def before_optimizer(_layer: nn.Module, inputs: tuple) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(before_backward)  # its gradient is there when the first layer's backward has ended

    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)):
        layers[0].register_forward_pre_hook(before_optimizer)
        layers[-1].register_forward_hook(after_layers)
        for layer in layers:
            layer.register_forward_pre_hook(before_forward)
            layer.register_forward_hook(after_forward)


@functools.cache
def glibc() -> Any:
    """The C library, if it is a glibc that tells of its heap; None elsewhere."""
    try:
        library: Any = ctypes.CDLL("libc.so.6")
        library.mallinfo2.restype = _MallocInfo
    except (OSError, AttributeError):
        return None
    return library
