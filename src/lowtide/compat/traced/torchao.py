"""What the project takes from the inside of torchao, and what it replaces there, while a run is traced."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

STATES = (("torchao.optim.subclass_8bit", "OptimState8bit"), ("torchao.optim.subclass_4bit", "OptimState4bit"))
"""The modules and names of the tensors that hold its optimizers' states."""


def make_code_tables() -> None:
    """Has torchao make the tables of its codes, which it keeps for the whole process.

    To be called where tensors have values; a trace that asks first would leave tables without them.
    """
    for module, name in STATES:
        state = getattr(importlib.import_module(module), name)
        for signed in (True, False):
            state.zeros((4096,), signed=signed)


@contextlib.contextmanager
def parameter_step_by(step: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, a function steps one parameter in place of the one that torchao compiles.

    Args:
        step: takes the parameter, its gradient, and what else the optimizer hands over.
    """
    with patch.object(importlib.import_module("torchao.optim.adam"), "single_param_adam", step):
        yield
