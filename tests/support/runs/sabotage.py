"""Makes a run fail at a chosen place, once: what the tests of recovery inject."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lowtide.ops.logits import linear_logprobs

PLACES = ("forward", "head", "backward")
OPTIMIZER = "optimizer"
"""A place of its own: the step alone is repeated, with the gradients that are there."""
ERRORS = {
    "CUDA": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 3.00 GiB"),
    "CPU": (RuntimeError, "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    "cuBLAS": (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}
"""How an exhausted memory shows, by who says so: type and text."""


def _passing(function: Callable[..., Tensor], pass_by: Callable[[], None]) -> Callable[..., Tensor]:
    """A function that makes tensors; `pass_by` is called where an optimizer of torch calls it."""

    def passed(*args: Any, **kwargs: Any) -> Tensor:
        if "/torch/optim/" in sys._getframe(1).f_code.co_filename:
            pass_by()
        return function(*args, **kwargs)

    return passed


@contextlib.contextmanager
def out_of_memory(model: nn.Module, place: str, number: int, error: str = "CUDA") -> Iterator[list[str]]:
    """While it lasts, the `number`-th passage (from 0) of a place raises an error of `ERRORS`.

    The optimizer's place is where it makes the states of a parameter: the passages of the first step are as many as
    parameters.

    Yields:
        the places where it did.
    """
    fired: list[str] = []
    passed = 0

    def pass_by() -> None:
        nonlocal passed
        passed += 1
        if passed == number + 1:
            fired.append(place)
            kind, text = ERRORS[error]
            raise kind(text)

    def in_forward(_module: nn.Module, _inputs: Any) -> None:
        pass_by()

    def in_backward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(lambda gradient: pass_by())

    chunks = linear_logprobs.ChunkedHead.chunks

    def in_head(self: Any, *args: Any) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        pass_by()
        return chunks(self, *args)

    if place == OPTIMIZER:
        with mock.patch.object(torch, "zeros_like", _passing(torch.zeros_like, pass_by)):
            yield fired
        return
    last = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[-1]
    handle = None
    if place == "forward":
        handle = last.register_forward_pre_hook(in_forward)
    elif place == "backward":
        handle = last.register_forward_hook(in_backward)
    else:
        linear_logprobs.ChunkedHead.chunks = in_head  # type: ignore[method-assign]
    try:
        yield fired
    finally:
        linear_logprobs.ChunkedHead.chunks = chunks  # type: ignore[method-assign]
        if handle is not None:
            handle.remove()
