"""What the optimizers of other packages allocate while they step, where a trace of fake tensors would not see it.

bitsandbytes steps in operations of its own. On a GPU they are kernels that allocate nothing; on a CPU they are Python,
with float32 copies of what they step, and run as such here. torchao compiles its step, which fake tensors cannot run: a
stand-in makes the buffers that the compiled one was seen to make.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.torch import run_python_kernel, without_modes
from lowtide.compat.traced.bitsandbytes import PYTHON_KERNELS, paged_states_by
from lowtide.compat.traced.torchao import make_code_tables, parameter_step_by
from lowtide.planner.devices import Device
from lowtide.planner.tracing.trace import Mode

COMPILED = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 26}
"""By optimizer of torchao, the bytes of buffers for each element of the parameter that is stepped: as torch's profiler
saw them on a CPU, of torchao 0.18 and torch 2.13, for weights in float32 and in bfloat16 alike."""
PAGED = ("paged_ademamix_32bit", "paged_ademamix_8bit")
"""Those that ask bitsandbytes for paged memory wherever their parameters lie, and so for CUDA's driver."""
UNTRACED = {"galore_adamw_8bit": "it steps weights in another shape than their own"}
"""Optimizers that fake tensors cannot run, and why."""
PAGED_FROM = 100_000
"""Elements of a state."""
OF_BITSANDBYTES = ("8bit", "bnb", "paged", "lion", "rmsprop", "ademamix")
"""What the names of its optimizers have in them."""


def pages_states(optimizer: str, device: Device) -> bool:
    """Whether the states that an optimizer makes for a device leave it when it is full: they are in memory that CUDA's
    driver moves (bitsandbytes' `get_state_buffer`, from `PAGED_FROM` elements on)."""
    return optimizer.startswith("paged_") and device.kind == "cuda"


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
            with without_modes():  # tables have values, even if it is a trace that asks first
                make_code_tables()
            step = partial(_compiled_step, COMPILED[optimizer])
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(parameter_step_by(step))
        if optimizer in PAGED and device.kind == "cuda" and find_spec("bitsandbytes") is not None:
            stack.enter_context(paged_states_by(_unpaged))
        if device.kind == "cpu" and any(part in optimizer for part in OF_BITSANDBYTES):
            stack.enter_context(_PythonKernels())
        yield


def _compiled_step(bytes_per_element: int, parameter: Tensor, grad: Tensor, *_: Any) -> None:
    """Stands for the function that torchao compiles, of one parameter."""
    buffers = parameter.new_empty(bytes_per_element * parameter.numel(), dtype=torch.uint8)
    parameter.copy_(grad)  # it reads one and writes the other
    del buffers


def _unpaged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    """A state of bitsandbytes' paged optimizers, whose memory CUDA's driver gives on a real device."""
    return torch.empty(shape, dtype=dtype)


class _PythonKernels(Mode):
    """Runs the CPU's own form of an operation, of which fake tensors would show the results alone."""

    def seen(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func.name() in PYTHON_KERNELS:
            return run_python_kernel(func, *args, **kwargs)
        return func(*args, **kwargs)
