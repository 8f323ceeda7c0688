"""The optimizer and the schedule of a trainer: lowtide's and those of the Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from lowtide.compat.accelerate import leave_states_in_place
from lowtide.compat.deepspeed import schedule_of
from lowtide.compat.torch import let_go
from lowtide.compat.trainer_optimizers import groups_as_on_one_rank
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.memory.optimizers.states import optimizer_name
from lowtide.ranks.shards import step_local_shards
from lowtide.run.optimizers import (
    KNOWN,
    check_flat,
    check_given,
    check_one_by_one,
    check_steps,
    settle_optimizer,
)
from lowtide.run.options.deepspeed import given_schedule
from lowtide.run.options.schedule import schedule_arguments, unevaluated, unreached
from lowtide.trainers.checkpoints.run_record import optimizer_layout

logger = logging.getLogger(__name__)


class OptimizerMaker:
    """Makes the optimizer and the schedule of a trainer, lowtide's own too. It refuses what cannot step as the options
    say before anything is trained, and puts states where they belong. What the Trainer makes comes as a function
    `theirs`.

    Attributes:
        name: as `optim` names the optimizer that steps; empty where one was passed whose states are not known.
        kind: its class.
        group_settings: the names in a group of its parameters.
        layout: what decides which states it has.
    """

    name: str
    kind: type
    group_settings: frozenset[str]
    layout: dict[str, Any]

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self._settled: Any = None
        """The optimizer whose states are where they belong."""

    def schedule(self, theirs: Callable[[], Any], num_training_steps: int, optimizer: Any) -> Any:
        """The Trainer's, with the steps of a decay that is said as a share of all, or as DeepSpeed's config says."""
        trainer, args = self.trainer, self.args
        if trainer.lr_scheduler is None and (found := given_schedule(args, num_training_steps)):
            trainer.lr_scheduler = schedule_of(*found, unwrap_optimizer(optimizer or trainer.optimizer))
            return trainer.lr_scheduler
        if trainer.lr_scheduler is None and (text := unreached(args, num_training_steps)):
            logger.warning(text)
        if text := unevaluated(args, num_training_steps):
            logger.warning(text)
        given = args.lr_scheduler_kwargs
        args.lr_scheduler_kwargs = schedule_arguments(args, num_training_steps) or None
        try:
            return theirs()
        finally:
            args.lr_scheduler_kwargs = given

    def check(self, theirs: Callable[[], Any]) -> None:
        """Makes the optimizer once, without states, so that one that cannot be made or used is refused now."""
        trainer, args = self.trainer, self.args
        given, kind = trainer.optimizer, None
        if given is not None:
            kind = type(unwrap_optimizer(given))
            check_given(kind, "optimizers", args)
        elif trainer.optimizer_cls_and_kwargs is not None:
            kind = trainer.optimizer_cls_and_kwargs[0]
            check_given(kind, "optimizer_cls_and_kwargs", args)
        self.name = optimizer_name(args) if kind is None else KNOWN.get(kind, "")
        with torch.random.fork_rng(devices=[]):  # some draw seeds
            made = unwrap_optimizer(self._made(theirs))
        check_steps(made, trainer.model)
        check_one_by_one(made, args)
        if args.zero_config is not None:
            check_flat(made)
        self.kind, self.group_settings = type(made), frozenset(made.param_groups[0])
        self.layout = optimizer_layout(made)
        trainer.optimizer = given

    def make(self, theirs: Callable[[], Any]) -> torch.optim.Optimizer:
        """The Trainer's, with its states where they belong."""
        optimizer = self._made(theirs)
        inner = unwrap_optimizer(optimizer)
        if inner is not self._settled:
            step_local_shards(inner)
            settle_optimizer(inner, self.args, self.trainer.model)
            self._settled = inner
        return optimizer

    def leave_states_in_place(self) -> None:
        """Keeps accelerate from moving states to the device that belong elsewhere."""
        leave_states_in_place(
            self.trainer.accelerator,
            lambda optimizer: self.args.zero_config or hasattr(unwrap_optimizer(optimizer), "host_states"),
        )

    def _made(self, theirs: Callable[[], Any]) -> torch.optim.Optimizer:
        """The Trainer's, which takes the groups out of the arguments that it is given, and torch fills them in."""
        trainer = self.trainer
        let_go(trainer.model)
        if trainer.optimizer_cls_and_kwargs is None:
            with groups_as_on_one_rank():
                return theirs()
        kind, options = trainer.optimizer_cls_and_kwargs
        given = {name: list(value) if name == "params" else value for name, value in options.items()}
        groups = [dict(each) if isinstance(each, dict) else each for each in given.get("params", ())]
        trainer.optimizer_cls_and_kwargs = kind, given | ({"params": groups} if groups else {})
        try:
            return theirs()
        finally:
            trainer.optimizer_cls_and_kwargs = kind, given
