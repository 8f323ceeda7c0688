"""Which kind of device a computation is for: the one where its tensors lie or, while memory is planned, another one.

Kernels and the sizes of workspaces depend on the device. A plan runs the same code on tensors without memory, which
lie on a CPU (torch has no autograd for CUDA tensors where it was built without CUDA), and `planning_for` has it choose
as it would on the device that is planned for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


class Target(NamedTuple):
    """A device, as far as choices depend on it."""

    kind: str
    """Of a torch device: `cpu`, `cuda`."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device."""
    planned: bool = False
    """Whether nothing is there but shapes."""


B = TypeVar("B")
Take = Callable[[Sequence[Any]], Iterable[Any]]
_planned: ContextVar[Target | None] = ContextVar("planned", default=None)
_take: ContextVar[Take | None] = ContextVar("take", default=None)


@contextlib.contextmanager
def planning_for(kind: str, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """While it lasts, all tensors count as lying on such a device."""
    token = _planned.set(Target(kind, capability or (0, 0), planned=True))
    try:
        yield
    finally:
        _planned.reset(token)


def kind_of(device: torch.device) -> str:
    """The kind of device that a computation on a device is for."""
    planned = _planned.get()
    return device.type if planned is None else planned.kind


def target_of(tensor: Tensor) -> Target:
    """The device that a computation on a tensor is for."""
    planned = _planned.get()
    if planned is not None:
        return planned
    if tensor.is_cuda:
        return Target("cuda", torch.cuda.get_device_capability(tensor.device))
    return Target(tensor.device.type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast takes products in there; None where it is off, as on the meta device, of which torch cannot be
    asked."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """While it lasts, products there are taken in the dtypes that they come in."""
    off = autocast_dtype(device) is None
    return contextlib.nullcontext() if off else torch.autocast(device.type, enabled=False)


def in_turn(blocks: Sequence[B]) -> Iterable[B]:
    """Blocks of which each is computed as the one before it: a plan may take a few for all."""
    take = _take.get()
    return blocks if take is None else take(blocks)


@contextlib.contextmanager
def taking(take: Take) -> Iterator[None]:
    """While it lasts, what is computed block by block is computed for those that `take` gives alone."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, which comes with the CUDA builds of torch."""
    return find_spec("triton") is not None
