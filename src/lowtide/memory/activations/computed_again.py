"""What a module needs that computes its forward in parts, keeps none of them, and computes each again in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_computing: ContextVar[bool] = ContextVar("computing", default=False)


@contextlib.contextmanager
def computing_parts() -> Iterator[None]:
    """Around parts in the forward of a step, whose inner results nobody needs to keep."""
    token = _computing.set(True)
    try:
        yield
    finally:
        _computing.reset(token)


def are_parts() -> bool:
    """Whether such parts are being computed."""
    return _computing.get()


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward, unbound, so that a copy of the module calls its own."""
    inner: Any = module.forward
    return inner.__func__ if getattr(inner, "__self__", None) is module else lambda _, *args, **kw: inner(*args, **kw)


class Shell(nn.Module):
    """Calls a function of a module, for `functional_call`."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)


def sum_wide(total: Tensor | None, part: Tensor) -> Tensor:
    """Adds in float32 at least: a lower dtype would round once a part."""
    if total is None:
        return part
    wide = torch.promote_types(total.dtype, torch.float32)
    return total.add_(part) if total.dtype == wide else total.to(wide).add_(part)
