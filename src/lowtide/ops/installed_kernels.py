"""Kernels of other libraries for operations that are written in torch here: where they are installed, on a GPU, and
shown to compute the same.

A kernel is looked up once. Before it serves inputs of some widths for the first time, it computes random inputs of
these widths beside the operation here: values and gradients. One that computes something else, or fails, is never used;
a warning says so.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.ops.target import target_of, without_autocast

logger = logging.getLogger(__name__)

TOLERANCE = 5e-2
"""Relative distance of values and gradients that the rounding of 16 bits explains."""


class Kernel(NamedTuple):
    """A function of another library."""

    package: str
    """Under which it is installed."""
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.package}"


Pairs = Callable[[Callable[..., Any]], Iterable[tuple[Tensor, Tensor]]]
"""Of a kernel's function: what it computes of some random inputs, values and gradients, each beside what it should."""

_observed: ContextVar[dict[Kernel, str | None] | None] = ContextVar("observed", default=None)
_found: dict[Hashable, Callable[..., Any] | str] = {}
"""By kernel, device, dtype and widths: the function that serves, or why none does."""


@contextlib.contextmanager
def observed_kernels() -> Iterator[dict[Kernel, str | None]]:
    """Collects the kernels that operations on a GPU ask for while the context lasts, with why one does not serve: None
    where it does."""
    found: dict[Kernel, str | None] = {}
    token = _observed.set(found)
    try:
        yield found
    finally:
        _observed.reset(token)


def serving(
    kernel: Kernel, like: Tensor, dtype: torch.dtype, widths: Hashable, pairs: Pairs
) -> Callable[..., Any] | None:
    """The function of a kernel; None where the operation here is to compute.

    Args:
        like: an input.
        dtype: what the inputs are given to the kernel in.
        widths: of the inputs, apart from tokens: what a kernel is compiled for.
        pairs: computes random inputs of these widths.
    """
    target = target_of(like)
    if target.kind != "cuda" or target.planned:
        return None
    key = (kernel, like.device, dtype, widths)
    if key not in _found:
        _found[key] = _looked_up(kernel, dtype, pairs)
    found = _found[key]
    reason = found if isinstance(found, str) else None
    if (observed := _observed.get()) is not None:
        observed[kernel] = observed.get(kernel) or reason
    return None if isinstance(found, str) else found


def _looked_up(kernel: Kernel, dtype: torch.dtype, pairs: Pairs) -> Callable[..., Any] | str:
    """A kernel's function, or why it does not serve."""
    try:
        function = getattr(importlib.import_module(kernel.module), kernel.name)
    except Exception as error:  # of Triton and CUDA, by card and version
        if isinstance(error, ImportError) and find_spec(kernel.module.partition(".")[0]) is None:
            return "is not installed"
        return f"cannot be imported: {type(error).__name__}: {_first_line(error)}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes 16 bits, where these layers compute in {str(dtype).removeprefix('torch.')}"
    reason = _why_unlike(function, pairs)
    if reason is None:
        return function
    logger.warning(f"{kernel} {reason}. It is not used: torch computes in its place")
    return reason


def _why_unlike(function: Callable[..., Any], pairs: Pairs) -> str | None:
    try:
        with torch.enable_grad():
            far = max(_distance(*pair) for pair in pairs(function))
    except Exception as error:  # of Triton and CUDA, by card and version
        return f"fails here with {type(error).__name__}: {_first_line(error)}"
    if far <= TOLERANCE:
        return None
    return (
        f"computes something else here: values or gradients are {far:.1g} apart, relatively, where rounding explains "
        f"{TOLERANCE:.0e}"
    )


def values_and_gradients(compute: Callable[..., Iterable[Tensor]], given: Iterable[Tensor | None]) -> list[Tensor]:
    """What is computed of inputs, and their gradients under a loss that weighs each number otherwise."""
    inputs = [None if each is None else each.detach().requires_grad_() for each in given]
    with without_autocast(next(each for each in inputs if each is not None).device):
        values = [*compute(*inputs)]
        loss = torch.stack([(value.float() * _weights(value)).sum() for value in values]).sum()
        wanted = [each for each in inputs if each is not None]
        return [*values, *torch.autograd.grad(loss, wanted)]


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), device=x.device).sin_().view(x.shape) + 0.5


def _distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    far = float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return float("inf") if math.isnan(far) else far


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
