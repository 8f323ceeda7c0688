"""Makes a run fail at a chosen place, once: what the tests of recovery inject."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.ops import linear_logprobs

PLACES = ("forward", "head", "backward")


@contextlib.contextmanager
def out_of_memory(model: nn.Module, place: str, number: int) -> Iterator[list[str]]:
    """While it lasts, the `number`-th passage (from 0) of a place raises as CUDA's allocator does.

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
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    def in_forward(_module: nn.Module, _inputs: Any) -> None:
        pass_by()

    def in_backward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(lambda gradient: pass_by())

    chunks = linear_logprobs._Head.chunks

    def in_head(self: Any) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        pass_by()
        return chunks(self)

    last = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[-1]
    handle = None
    if place == "forward":
        handle = last.register_forward_pre_hook(in_forward)
    elif place == "backward":
        handle = last.register_forward_hook(in_backward)
    else:
        linear_logprobs._Head.chunks = in_head  # type: ignore[method-assign]
    try:
        yield fired
    finally:
        linear_logprobs._Head.chunks = chunks  # type: ignore[method-assign]
        if handle is not None:
            handle.remove()
