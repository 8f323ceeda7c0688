"""The optimizer that `transformers.Trainer` makes of its options, where there is no Trainer."""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import transformers.trainer
from torch import nn
from transformers import Trainer
from transformers.trainer_optimizer import _parse_optim_args


class _AsTrainer:
    """What `Trainer.create_optimizer` reads of a trainer."""

    def __init__(self, model: nn.Module, args: Any) -> None:
        self.model, self.args = model, args
        self.optimizer = self.optimizer_cls_and_kwargs = None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return Trainer.get_decay_parameter_names(self, model)  # type: ignore[arg-type]

    def get_optimizer_cls_and_kwargs(self, args: Any, model: nn.Module) -> Any:
        return Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]


def trainer_optimizer(model: nn.Module, args: Any, kind: tuple[Any, Any] | None = None) -> torch.optim.Optimizer:
    """The optimizer of the options `args`, with the Trainer's groups of parameters; or of a class and its arguments."""
    stand_in: Any = _AsTrainer(model, args)
    stand_in.optimizer_cls_and_kwargs = kind
    return Trainer.create_optimizer(stand_in)


@contextlib.contextmanager
def groups_as_on_one_rank() -> Iterator[None]:
    """While it lasts, the Trainer makes an optimizer's groups as on one rank.

    It would make a group for each device mesh that parameters are on, for kernels that step several at once. Here those
    step the parts that lie on this rank.
    """
    with patch.object(transformers.trainer, "has_mixed_dtensor", lambda parameters: False, create=True):
        yield


class _Read(UserDict):
    """The arguments of `optim_args`, and which of them are read."""

    def __init__(self, given: dict[str, str]) -> None:
        super().__init__(given)
        self.unread = set(given)

    def __getitem__(self, name: str) -> str:
        self.unread.discard(name)
        return super().__getitem__(name)


def tried_optimizer(args: Any) -> tuple[Exception | None, list[str]]:
    """(why transformers finds no optimizer for the options `args`, None where it does; the names in `optim_args` that
    it does not read). It asks for the optimizer's class, as the Trainer does once a model is loaded."""
    with torch.device("meta"):  # where no random numbers are drawn, which adapters begin with
        stand_in: Any = nn.Linear(1, 1)
    read, args = _Read(_parse_optim_args(args.optim_args)), copy.copy(args)
    if args.optim_target_modules is not None:
        args.optim_target_modules = "all-linear"  # the stand-in has no module of the names that are given
    try:
        with patch.object(transformers.trainer, "_parse_optim_args", lambda _: read):
            Trainer.get_optimizer_cls_and_kwargs(args, stand_in)
    except Exception as error:
        return error, []
    return None, sorted(read.unread)


def is_missing_package(error: Exception) -> bool:
    """Whether transformers says that a package is not installed."""
    missing = isinstance(error, ImportError) or isinstance(error.__context__, ImportError)
    return missing or "install" in str(error)
