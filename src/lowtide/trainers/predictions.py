"""A trainer's run as the planner sees it, and what it would take with other settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from datasets import Dataset

from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.engine.reference import ArrivedPolicy
from lowtide.engine.weights.model_init import config_init, model_init
from lowtide.planner.advice import Advice, advise
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import Estimate, estimate_run
from lowtide.planner.tracing.described_model import config_of_model, with_adapters_of
from lowtide.planner.tracing.fake_run import RunInputs
from lowtide.planner.tracing.reward_models import DescribedRewards
from lowtide.planner.tracing.teachers import DescribedTeacher
from lowtide.planner.tracing_process import in_tracing_process
from lowtide.trainers.reports.reported import Reported

if TYPE_CHECKING:
    from lowtide.methods.method import Method
    from lowtide.run.options.training import TrainingConfig

logger = logging.getLogger(__name__)


def run_of(
    method: Method,
    args: TrainingConfig,
    model: Any,
    *,
    requested: Mapping[str, Any],
    **inputs: Unpack[RunInputs],
) -> PlannedRun:
    """What is trained, with the user's own settings; of a model that is there, or by its name."""
    inputs = with_adapters_of(model, inputs)
    quantization_config = inputs.get("quantization_config")
    own = {**requested, "output_dir": args.output_dir}
    if isinstance(model, str):
        init = model_init(
            cast(Any, args.model_init_kwargs),
            trust_remote_code=args.trust_remote_code,
            quantization_config=quantization_config,
        )
        described = config_of_model(model, **config_init(init))
        quantization_config = init.pop("quantization_config", None)
        own["model_init_kwargs"] = init
    else:
        described = causal_model(model).config
        quantization_config = getattr(described, "quantization_config", None)
        own["dtype"] = str(embedding_weight(model).dtype).removeprefix("torch.")
    device = device_named(args.device.type).with_rates()
    return PlannedRun(
        method,
        described,
        own,
        device,
        inputs.get("processing_class"),
        inputs.get("peft_config"),
        bool(inputs.get("adapters_trained")),
        quantization_config,
        samples=False,
        rewards=DescribedRewards.of(inputs.get("reward_funcs")),
        teacher=DescribedTeacher.of(inputs.get("teacher_model"), args),
        from_files=isinstance(model, str),
    )


def advised(
    trainer: Reported,
    held: Mapping[str, int],
    row_tokens: tuple[int, ...],
    *,
    beside: int | None = None,
    each: int = 2,
) -> tuple[list[Advice], Estimate | ValueError]:
    """What would lower a trainer's peak, with its predicted effect; and the estimate of the run as it is, or why there
    is none, in which case the advice has no effects.

    Args:
        held: bytes by category, at the peak.
        row_tokens: of each row of the heaviest micro-batch.
        beside: see `predicted`.
        each: how many changes are considered of each category.
    """
    estimates: list[Estimate | ValueError] = []

    def peaks(changes: Sequence[Mapping[str, Any]]) -> list[int | None]:
        try:
            estimates[:] = predicted(trainer, changes, beside=beside)
        except Exception as reason:  # an advice without its effect is one still
            logger.info(f"no predictions: {reason}")
            estimates[:] = [ValueError(str(reason))] * len(changes)
        return [None if isinstance(found, ValueError) else found.tensor_bytes for found in estimates]

    return advise(trainer.site, held, row_tokens, peaks, each), estimates[0]


def predicted(
    trainer: Reported, changes: Sequence[Mapping[str, Any]], *, beside: int | None = None
) -> list[Estimate | ValueError]:
    """What a trainer's run would take with some settings changed, for each of several changes; or why that cannot be
    told.

    Args:
        beside: what the process holds on a CPU beside tensors; by default as it is measured here.

    Raises:
        ValueError: it cannot be told of such a run.
    """
    if not isinstance(trainer.train_dataset, Dataset):
        raise ValueError("the lengths of the rows are not known beforehand")
    adapters = getattr(trainer.model, "peft_config", {})
    run = run_of(
        trainer.method,
        trainer.args,
        trainer.model,
        requested={**trainer.args.requested, **trainer.planned.settings},
        peft_config=next(iter(adapters.values()), None),
        adapters_trained=isinstance(getattr(trainer, "reference", None), ArrivedPolicy),
        reward_funcs=getattr(trainer, "reward_models", None),
        teacher_model=getattr(trainer, "teacher_model", None),
    )
    return in_tracing_process(_estimates, run, trainer.train_dataset, changes, beside)


def _estimates(
    run: PlannedRun, rows: Dataset, changes: Sequence[Mapping[str, Any]], beside: int | None
) -> list[Estimate | ValueError]:
    return [_estimate(run, rows, settings, beside) for settings in changes]


def _estimate(run: PlannedRun, rows: Dataset, settings: Mapping[str, Any], beside: int | None) -> Estimate | ValueError:
    try:
        return estimate_run(run.faked(rows, settings), run.device, beside=beside)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return ValueError(str(error))
