"""`transformers.Trainer` that makes lowtide's optimizers beside its own."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer

from lowtide.compat.accelerate import leave_states_in_place
from lowtide.compat.deepspeed import schedule_of
from lowtide.compat.torch import let_go
from lowtide.compat.trainer_optimizers import groups_as_on_one_rank
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.memory.optimizers.states import optimizer_name
from lowtide.ranks.shards import step_local_shards
from lowtide.run.optimizers import (
    KNOWN,
    NAMES,
    check_flat,
    check_given,
    check_one_by_one,
    check_steps,
    own_optimizer,
    settle_optimizer,
)
from lowtide.run.options.deepspeed import given_schedule
from lowtide.run.options.schedule import schedule_arguments, unreached
from lowtide.trainers.checkpoints.run_record import optimizer_layout

logger = logging.getLogger(__name__)


class OwnOptimizers(Trainer):
    """`transformers.Trainer` that makes lowtide's optimizers too, refuses what cannot step as the options say before
    anything is trained, and puts states where they belong."""

    args: Any
    optimizer: Any
    optimizer_name: str
    """As `optim` names the optimizer that steps; empty where one was passed whose states are not known."""
    optimizer_kind: type
    group_settings: frozenset[str]
    """The names in a group of the optimizer's parameters."""
    states_layout: dict[str, Any]
    """What decides which states the optimizer has."""
    _settled: Any = None
    """The optimizer whose states are where they belong."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """As the Trainer's, and lowtide's own."""
        return own_optimizer(args, model) if args.optim in NAMES else Trainer.get_optimizer_cls_and_kwargs(args, model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the Trainer's, with the steps of a decay that is said as a share of all, or as DeepSpeed's config says."""
        if self.lr_scheduler is None and (found := given_schedule(self.args, num_training_steps)):
            self.lr_scheduler = schedule_of(*found, unwrap_optimizer(optimizer or self.optimizer))
            return self.lr_scheduler
        if self.lr_scheduler is None and (text := unreached(self.args, num_training_steps)):
            logger.warning(text)
        given = self.args.lr_scheduler_kwargs
        self.args.lr_scheduler_kwargs = schedule_arguments(self.args, num_training_steps) or None
        try:
            return super().create_scheduler(num_training_steps, optimizer)
        finally:
            self.args.lr_scheduler_kwargs = given

    def check_optimizer(self) -> None:
        """Makes the optimizer once, without states, so that one that cannot be made or used is refused now."""
        given, kind = self.optimizer, None
        if given is not None:
            kind = type(unwrap_optimizer(given))
            check_given(kind, "optimizers", self.args)
        elif self.optimizer_cls_and_kwargs is not None:
            kind = self.optimizer_cls_and_kwargs[0]
            check_given(kind, "optimizer_cls_and_kwargs", self.args)
        self.optimizer_name = optimizer_name(self.args) if kind is None else KNOWN.get(kind, "")
        with torch.random.fork_rng(devices=[]):  # some draw seeds
            made = unwrap_optimizer(self._made_optimizer(None))
        check_steps(made, cast(nn.Module, self.model))
        check_one_by_one(made, self.args)
        if self.args.zero_config is not None:
            check_flat(made)
        self.optimizer_kind, self.group_settings = type(made), frozenset(made.param_groups[0])
        self.states_layout = optimizer_layout(made)
        self.optimizer = given

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; accelerate would move states to the device that belong elsewhere."""
        super().create_accelerator_and_postprocess()
        leave_states_in_place(
            self.accelerator,
            lambda optimizer: self.args.zero_config or hasattr(unwrap_optimizer(optimizer), "host_states"),
        )

    def _made_optimizer(self, model: Any) -> torch.optim.Optimizer:
        """As the Trainer's, which takes the groups out of the arguments that it is given, and torch fills them in."""
        let_go(cast(nn.Module, self.model))
        if self.optimizer_cls_and_kwargs is None:
            with groups_as_on_one_rank():
                return super().create_optimizer(model)
        kind, options = self.optimizer_cls_and_kwargs
        given = {name: list(value) if name == "params" else value for name, value in options.items()}
        groups = [dict(each) if isinstance(each, dict) else each for each in given.get("params", ())]
        self.optimizer_cls_and_kwargs = kind, given | ({"params": groups} if groups else {})
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = kind, given

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As the Trainer's, with its states where they belong."""
        optimizer = self._made_optimizer(model)
        inner = unwrap_optimizer(optimizer)
        if inner is not self._settled:
            step_local_shards(inner)
            settle_optimizer(inner, self.args, cast(nn.Module, self.model))
            self._settled = inner
        return optimizer
