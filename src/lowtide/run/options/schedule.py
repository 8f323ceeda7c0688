"""The schedule of the learning rate: what a config says of it, as transformers takes it."""

from __future__ import annotations

import math
from typing import Any

from transformers.trainer_utils import IntervalStrategy, SchedulerType

WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU)
"""Schedules that begin with the whole learning rate."""
STABLE_THEN_DECAY, FALLING = SchedulerType.WARMUP_STABLE_DECAY, "num_decay_steps"


def schedule_arguments(args: Any, steps: int) -> dict[str, Any]:
    """Further arguments of the schedule of a run of so many steps: `lr_scheduler_kwargs`, and the steps of the decay
    where `decay_steps` says them, as a number or as a share.

    Raises:
        ValueError: warmup and decay together are longer than the run.
    """
    given = dict(args.lr_scheduler_kwargs or {})
    wanted = getattr(args, "decay_steps", None)
    if wanted is None or SchedulerType(args.lr_scheduler_type) != STABLE_THEN_DECAY or FALLING in given:
        return given
    falling = int(wanted) if wanted >= 1 else math.ceil(steps * wanted)
    rising = args.get_warmup_steps(steps)
    if falling + rising > steps:
        raise ValueError(
            f"decay_steps={wanted:g} and warmup_steps={args.warmup_steps:g} are {falling} and {rising} of the run's "
            f"{steps} steps: lower one of them"
        )
    return given | {FALLING: falling}


def unreached(args: Any, steps: int) -> str:
    """Says that the warmup of a run of so many steps lasts to its end; empty where it ends before."""
    rising = args.get_warmup_steps(steps)
    if rising < max(steps, 1) or SchedulerType(args.lr_scheduler_type) in WITHOUT_WARMUP:
        return ""
    return (
        f"warmup_steps={args.warmup_steps:g} raises the learning rate over {rising} steps, and the run has {steps}: "
        f"learning_rate={args.learning_rate:g} is never reached. Lower warmup_steps"
    )


def unevaluated(args: Any, steps: int) -> str:
    """Says that a run of so many steps ends before the first evaluation that it asks for; empty where it does not."""
    if IntervalStrategy(args.eval_strategy) != IntervalStrategy.STEPS:
        return ""
    every = math.ceil(steps * args.eval_steps) if args.eval_steps < 1 else args.eval_steps
    first = max(1, math.ceil(args.eval_delay / every)) * every
    if first <= steps:
        return ""
    name = "eval_delay" if every <= steps else "eval_steps"
    return (
        f"{name}={getattr(args, name):g} is beyond the run's {steps} steps, so that it is not evaluated while it "
        f"trains. Lower {name}"
    )
