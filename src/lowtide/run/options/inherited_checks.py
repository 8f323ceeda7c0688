"""Options that `transformers.TrainingArguments` takes and its Trainer fails on later, refused at construction."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
from transformers.trainer_callback import EarlyStoppingCallback
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType

from lowtide.compat.torch import compile_modes
from lowtide.option_values import check_flags
from lowtide.run.options.schedule import schedule_arguments
from lowtide.spelling import nearest

PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "flyte": "flytekit", "kubeflow": "kubeflow-trainer"}
"""Trackers whose package has another name."""
UNCHECKED = {"azure_ml", "flyte"}
"""Trackers that `get_available_reporting_integrations` leaves out although they may be there."""
COUNTED = ("all", "non_padding", "no")
FROM_TRAINER = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
WITHOUT_ARGUMENTS = {SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP}
"""Schedules to which transformers passes no `lr_scheduler_kwargs`."""
OF_LOADERS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
OF_CHECKPOINTS = ("use_reentrant", "preserve_rng_state", "debug", "early_stop")
TRIED_STEPS, TRIED_RUN = 3, 10**6
"""Steps that a schedule is tried for, of a run of so many."""

logger = logging.getLogger(__name__)


def check_inherited(args: Any) -> None:
    """Refuses what would fail once the Trainer is made, or as it makes its optimizer.

    Args:
        args: a config whose values have the right types, before `TrainingArguments.__post_init__`.

    Raises:
        ValueError: naming the option, the value and what to do.
    """
    check_trackers(args.report_to)
    check_schedule(args.lr_scheduler_type, schedule_arguments(args, TRIED_RUN), args.learning_rate)
    given = args.accelerator_config
    if isinstance(given, Mapping):
        _refuse_unknown("accelerator_config", given, [each.name for each in dataclasses.fields(AcceleratorConfig)])
        check_flags("accelerator_config", given, OF_LOADERS)
    check_flags("gradient_checkpointing_kwargs", args.gradient_checkpointing_kwargs, OF_CHECKPOINTS)
    if args.optim_args and not all(part.count("=") == 1 for part in args.optim_args.split(",")):
        raise ValueError(f"optim_args={args.optim_args!r} must be of the form 'name=value,name=value'")
    for name in ("dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        if (value := getattr(args, name)) and not args.dataloader_num_workers:
            raise ValueError(f"{name}={value!r} requires dataloader_num_workers above 0")
    check_steps(args)
    check_evaluation(args)
    check_compiler(args.torch_compile_backend, args.torch_compile_mode)
    counted = args.include_num_input_tokens_seen
    if not isinstance(counted, bool) and counted not in COUNTED:
        raise ValueError(f"include_num_input_tokens_seen={counted!r} is not one of {', '.join(COUNTED)}")


def check_compiler(backend: str | None, mode: str | None = None) -> None:
    """Refuses a backend of `torch.compile` that accelerate does not know, and a mode that inductor does not.

    Raises:
        ValueError: naming the nearest.
    """
    known = [each.lower() for each in DynamoBackend.list()]
    if backend and backend.lower() not in known:
        raise ValueError(
            f"torch_compile_backend={backend!r} is not one of {', '.join(known)}{nearest(backend.lower(), known)}"
        )
    if mode and (backend or "inductor").lower() == "inductor" and mode not in (modes := compile_modes()):
        raise ValueError(f"torch_compile_mode={mode!r} is not one of {', '.join(modes)}{nearest(mode, modes)}")


def check_trackers(report_to: Any) -> None:
    """Refuses trackers that there are not, or that are not installed.

    Raises:
        ValueError: naming the tracker, and the package to install.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if names in (["all"], ["none"]):
        return
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            near = nearest(str(name), INTEGRATION_TO_CALLBACK)
            raise ValueError(f"report_to={name!r} is not one of {known}, all, none{near}")
        if name not in UNCHECKED and name not in get_available_reporting_integrations():
            raise ValueError(
                f"report_to={name!r} needs a package that is not installed: pip install {PACKAGES.get(name, name)}, "
                "or set report_to='none'"
            )


def check_steps(args: Any) -> None:
    """Refuses to log or save every 0 steps, and says what evaluating every 0 steps means.

    Raises:
        ValueError: naming the option, and the strategy that does nothing.
    """
    for what, nothing in (("logging", "log nothing"), ("save", "save no checkpoints")):
        if getattr(args, f"{what}_strategy") == "steps" and getattr(args, f"{what}_steps") == 0:
            raise ValueError(
                f"{what}_steps=0 must be above 0 with {what}_strategy='steps': set {what}_strategy='no' to {nothing}"
            )
    if args.eval_strategy == "steps" and args.eval_steps == 0:
        logger.warning(
            f"eval_steps=0 is taken for None: every logging_steps={args.logging_steps:g} steps. Set "
            "eval_strategy='no' to evaluate nothing"
        )


def check_evaluation(args: Any) -> None:
    """Refuses what looks for the best of evaluations where there are none.

    Raises:
        ValueError: naming the option.
    """
    best = {"load_best_model_at_end": args.load_best_model_at_end, "save_strategy": args.save_strategy == "best"}
    for name, asked in best.items():
        if asked and args.eval_strategy == "no":
            value = getattr(args, name)
            raise ValueError(
                f"{name}={getattr(value, 'value', value)!r} compares evaluations, and eval_strategy='no' has none: set "
                f"eval_strategy to 'steps' or 'epoch', or leave {name} out"
            )


def check_starts(args: Any, eval_dataset: Any) -> None:
    """Refuses to evaluate before the first step where there is nothing to evaluate on.

    Raises:
        ValueError: naming the option.
    """
    if args.eval_on_start and eval_dataset is None:
        raise ValueError("eval_on_start=True requires rows to evaluate on: pass `eval_dataset`, or leave it out")


def check_early_stopping(callbacks: Iterable[Any] | None, args: Any) -> None:
    """Refuses early stopping without evaluations, or without the metric that they are compared by.

    Raises:
        ValueError: naming the option to set.
    """
    for each in callbacks or ():
        if each is not EarlyStoppingCallback and not isinstance(each, EarlyStoppingCallback):
            continue
        lacking = (
            "eval_strategy='steps' or 'epoch'" if args.eval_strategy == "no"
            else "metric_for_best_model, 'loss' say" if args.metric_for_best_model is None
            else None
        )  # fmt: skip
        if lacking is not None:
            raise ValueError(f"EarlyStoppingCallback compares evaluations by a metric: set {lacking}, or leave it out")


def check_schedule(kind: str, given: Mapping[str, Any], learning_rate: float) -> None:
    """Tries a schedule of the learning rate on an optimizer of one number.

    Raises:
        ValueError: its arguments are unknown, missing or of a wrong type.
    """
    schedule = SchedulerType(kind)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
    if given:
        _refuse_unknown(f"lr_scheduler_kwargs (lr_scheduler_type={kind!r})", given, _arguments(schedule, optimizer))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = get_scheduler(schedule, optimizer, 2, TRIED_RUN, dict(given))
            for _ in range(TRIED_STEPS if isinstance(made, LambdaLR) else 0):
                optimizer.step()
                made.step()
    except Exception as error:
        raise ValueError(
            f"lr_scheduler_type={kind!r} cannot be made with lr_scheduler_kwargs={dict(given)} and "
            f"learning_rate={learning_rate}: {error}"
        ) from error


def _arguments(schedule: SchedulerType, optimizer: torch.optim.Optimizer) -> list[str]:
    """The arguments that a schedule takes beside those that the Trainer passes."""
    if schedule in WITHOUT_ARGUMENTS:
        return []
    parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[schedule]).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        made: LRScheduler = get_scheduler(schedule, optimizer)
        parameters = inspect.signature(type(made)).parameters
    return [name for name in parameters if name not in FROM_TRAINER]


def _refuse_unknown(option: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        there = f"takes {', '.join(known)}" if known else "takes none"
        raise ValueError(f"{option}: {unknown!r} is unknown{nearest(str(unknown), known)} (it {there})")
