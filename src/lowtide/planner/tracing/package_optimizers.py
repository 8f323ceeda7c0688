"""What the optimizers of other packages allocate while they step, where a trace of fake tensors would not see it.

bitsandbytes steps in operations of its own. On a GPU they are kernels that allocate nothing; on a CPU they are Python,
with float32 copies of what they step, and run as such here. torchao compiles its step, which fake tensors cannot run: a
stand-in makes the buffers that the compiled one was seen to make.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.planner.devices import Device
from lowtide.planner.tracing.trace import Mode

COMPILED = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 26}
"""By optimizer of torchao, the bytes of buffers for each element of the parameter that is stepped: as torch's profiler
saw them on a CPU, of torchao 0.18 and torch 2.13, for weights in float32 and in bfloat16 alike."""
PAGED = ("paged_ademamix_32bit", "paged_ademamix_8bit")
"""Those that ask bitsandbytes for paged memory wherever their parameters lie, and so for CUDA's driver."""
UNTRACED = {"galore_adamw_8bit": "it steps weights in another shape than their own"}
"""Optimizers that fake tensors cannot run, and why."""
OF_BITSANDBYTES = ("8bit", "bnb", "paged", "lion", "rmsprop", "ademamix")
"""What the names of its optimizers have in them."""
IN_PYTHON = ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise")


@contextlib.contextmanager
def as_stepped(optimizer: str, device: Device) -> Iterator[None]:
    """While it lasts, an optimizer's step on fake tensors allocates as on a device.

    To be entered within the trace, so that it sees what is allocated here.

    Args:
        optimizer: name as in `TrainingArguments.optim`.
        device: where the real one steps.

    Raises:
        ValueError: the optimizer cannot be traced.
    """
    if optimizer in UNTRACED:
        raise ValueError(
            f"optim={optimizer!r} cannot be traced without values, since {UNTRACED[optimizer]}: take another to "
            "estimate and plan, or measure a short run (--max_steps 2 --memory_report report.json)"
        )
    with contextlib.ExitStack() as stack:
        if optimizer in COMPILED and find_spec("torchao") is not None:  # without it the trainer says what it needs
            _make_tables()
            step = _CompiledStep(COMPILED[optimizer])
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(patch.object(importlib.import_module("torchao.optim.adam"), "single_param_adam", step))
        if optimizer in PAGED and device.kind == "cuda" and find_spec("bitsandbytes") is not None:
            functional = importlib.import_module("bitsandbytes.functional")
            stack.enter_context(patch.multiple(functional, get_paged=_unpaged, fill=Tensor.fill_))
        if device.kind == "cpu" and any(part in optimizer for part in OF_BITSANDBYTES):
            stack.enter_context(_PythonKernels())
        yield


def _make_tables() -> None:
    """torchao keeps the tables of its codes for the whole process: they are made with values, before a trace asks."""
    with _disable_current_modes():
        for name, kind in (("subclass_8bit", "OptimState8bit"), ("subclass_4bit", "OptimState4bit")):
            state = getattr(importlib.import_module(f"torchao.optim.{name}"), kind)
            for signed in (True, False):
                state.zeros((4096,), signed=signed)


class _CompiledStep:
    """Stands for the function that torchao compiles, of one parameter."""

    def __init__(self, bytes_per_element: int) -> None:
        self.bytes_per_element = bytes_per_element

    def __call__(self, parameter: Tensor, grad: Tensor, *_: Any) -> None:
        buffers = parameter.new_empty(self.bytes_per_element * parameter.numel(), dtype=torch.uint8)
        parameter.copy_(grad)  # it reads one and writes the other
        del buffers


def _unpaged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    """A state of bitsandbytes' paged optimizers, whose memory CUDA's driver gives on a real device."""
    return torch.empty(shape, dtype=dtype)


class _PythonKernels(Mode):
    """Runs the CPU's own form of an operation, of which fake tensors would show the results alone."""

    def seen(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func.name() in IN_PYTHON:
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        return func(*args, **kwargs)
