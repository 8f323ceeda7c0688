"""The optimizer that `transformers.Trainer` makes of its options, where there is no Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer


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
