"""`memory_budget`: the settings that fit it, chosen when a trainer is made, before any weight is loaded.

Only exact settings are chosen, and none that was set by hand.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, Unpack

from lowtide.escaping import shown
from lowtide.methods.method import Method
from lowtide.planner.budget import read_budget
from lowtide.planner.candidate import first_rows
from lowtide.planner.plan import BelowWeights, PlanError, check_weights, make_plan, settings_text
from lowtide.planner.tracing.fake_run import RunInputs
from lowtide.planner.tracing_process import in_tracing_process
from lowtide.process.quiet_logs import only_from
from lowtide.run.options.training import TrainingConfig
from lowtide.trainers.predictions import run_of


class Fitted(NamedTuple):
    """What a budget chose, and what the start-up report says of it."""

    settings: dict[str, Any]
    text: str
    peak_bytes: int | None = None
    """That was predicted: of the process on a CPU, of tensors on CUDA."""


def fit_budget(
    method: Method,
    args: TrainingConfig,
    model: Any,
    dataset: Any,
    *,
    whole_rows: bool = False,
    **inputs: Unpack[RunInputs],
) -> Fitted:
    """Chooses what fits `memory_budget`, and sets it in the config; where nothing fits, what takes least, said aloud:
    no run is refused for a prediction alone. A budget below the weights, which are no prediction, is refused.

    Args:
        whole_rows: whether something needs rows whole, so that none may be run in pieces.

    Raises:
        ValueError: the run cannot be planned, or the budget is below its weights; says why, and what to do.
    """
    assert args.memory_budget is not None
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"memory_budget={args.memory_budget!r} cannot be planned for a model that has adapters already, whose "
            "weights are not traced: choose the settings by hand and leave it out"
        )
    if args.world_size > 1:
        raise ValueError(
            f"memory_budget={args.memory_budget!r} cannot be planned on {args.world_size} ranks at once: plan it "
            "before (`lowtide plan METHOD --output plan.yaml`), and start the ranks with --config plan.yaml"
        )
    if dataset is None:
        raise ValueError(f"memory_budget={args.memory_budget!r} needs a `train_dataset`, to know what a step will see")
    rows, notes = first_rows(dataset)
    run = run_of(method, args, model, requested=args.requested, **inputs)
    run = replace(run, whole_rows=whole_rows, streamed=rows is not dataset)
    room, of_budget = read_budget(args.memory_budget, run.device)
    try:
        with _what_the_run_says_itself():
            check_weights(run, rows, room)
            plan = in_tracing_process(make_plan, run, rows, room, explain=False)
    except BelowWeights:
        raise
    except PlanError as error:
        chosen = settings_text(error.settings) if error.settings else "the settings that it has"
        warnings.warn(shown(f"{error} The run goes on with {chosen}."), stacklevel=2)
        _set(args, error.settings)
        peak = error.peak_bytes if run.device.kind == "cpu" else None
        return Fitted(dict(error.settings), f"nothing fits by the estimate: {error.reason}", peak or None)
    _set(args, plan.settings)
    found = plan.estimate
    peak = found.peak_bytes if run.device.kind == "cpu" else found.tensor_bytes
    return Fitted(dict(plan.settings), "; ".join([plan.summary(), *of_budget, *plan.notes, *notes]), peak)


@contextlib.contextmanager
def _what_the_run_says_itself() -> Iterator[None]:
    """While it lasts nothing is warned of: options and rows are those of the run, which warns of them as it begins."""
    with only_from(logging.CRITICAL, "lowtide"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _set(args: TrainingConfig, settings: Mapping[str, Any]) -> None:
    """Sets options in a config with all that follows from them at construction, and leaves the others as they are."""
    kind = type(args)
    with _what_the_run_says_itself():
        before, after = kind(**args.requested), kind(**{**args.requested, **settings})
    for each in fields(args):
        value = getattr(after, each.name)
        if value != getattr(before, each.name):
            setattr(args, each.name, value)
