"""What a run with some settings would take, by a trace; and its rows, prepared once for all traces."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig

from lowtide.data.batches.heaviest import check_positions, heaviest_rows, longest_row
from lowtide.memory.optimizers.states import optimizer_name, predict_states
from lowtide.methods.method import Method
from lowtide.planner.cluster import Cluster
from lowtide.planner.devices import Device
from lowtide.planner.estimate import Estimate, estimate_run
from lowtide.planner.search import Refused, Sizes
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.planner.tracing.following import stack_of
from lowtide.planner.tracing.positions import beyond, made_for, positions_of
from lowtide.planner.tracing.reward_models import NO_REWARD_MODELS, DescribedRewards
from lowtide.planner.tracing.teachers import DescribedTeacher
from lowtide.run.optimizers import LORA_FA, streams_trained
from lowtide.run.options.configs import config_class
from lowtide.run.training_run import TrainingRun

RUN_OPTIONS = ("dtype", "use_peft")
"""Settings of a plan that are of the model, and not of the method's config."""


@dataclass(frozen=True)
class PlannedRun:
    """A run that is planned, apart from what is to be chosen."""

    method: Method
    described: PretrainedConfig
    requested: Mapping[str, Any]
    """A user's own settings of the method's config."""
    device: Device
    processing_class: Any = None
    peft_config: Any = None
    adapters_trained: bool = False
    """Whether these adapters come with the model, trained before."""
    quantization_config: Any = None
    samples: bool = True
    """Whether a sample may stand for rows that have yet to be prepared; a trainer prepares them all in any case."""
    rewards: DescribedRewards = NO_REWARD_MODELS
    """The reward models, of a method whose policy writes."""
    teacher: DescribedTeacher | None = None
    """Of a method with one."""
    cluster: Cluster | None = None
    """Several devices that share it; None for one."""
    prepared: bool = False
    """Whether its rows are token rows already, for which no tokenizer is needed."""
    from_files: bool = True
    """Whether its weights are loaded from files; false for a model that is there already."""
    whole_rows: bool = False
    """Whether no budget may be below the longest row, since something that no trace sees needs rows whole."""
    streamed: bool = False
    """Whether it reads its rows while it trains."""
    exact: bool = True
    """Whether only settings may be chosen that leave the numbers alone."""
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What was traced of it over several devices, which plans for other numbers of them share."""

    def config(self, options: Mapping[str, Any]) -> Any:
        """The method's config, as the run would have it on the device.

        Raises:
            ValueError: the options do not go together.
        """
        chosen = copy.deepcopy({"output_dir": "plan", **self.requested, **options, "memory_budget": None})
        if self.device.kind == "cuda" and chosen.get("bf16") is None:
            chosen["bf16"] = not chosen.get("fp16") and self.device.has_bf16
        # `tf32` takes no memory, and is refused where there is no GPU to set it on.
        chosen |= {"use_cpu": True, "tf32": None, "report_to": "none", "disable_tqdm": True}
        if "dtype" in chosen:
            chosen["model_init_kwargs"] = {**(chosen.get("model_init_kwargs") or {}), "dtype": chosen["dtype"]}
        for name in RUN_OPTIONS:
            chosen.pop(name, None)
        return config_class(self.method)(**chosen)

    def adapters(self, options: Mapping[str, Any]) -> Any:
        """The adapters that would be trained: the user's own, or those that `--use_peft` stands for."""
        if self.peft_config is not None or not options.get("use_peft"):
            return self.peft_config
        from peft import LoraConfig

        return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.05, bias="none")

    def faked(self, prepared: Dataset, options: Mapping[str, Any]) -> FakeRun:
        """The run with some options, on prepared rows and tensors without memory."""
        return FakeRun(
            self.method,
            self.config(options),
            self.described,
            prepared,
            peft_config=self.adapters(options),
            adapters_trained=self.adapters_trained,
            quantization_config=self.quantization_config,
            rewards=self.rewards,
            teacher_model=self.teacher,
            prepared=True,
        )


STREAMED_ROWS = 1000
"""Of a stream, whose end nobody knows, so many rows are planned for."""


def first_rows(rows: Dataset | IterableDataset) -> tuple[Dataset, tuple[str, ...]]:
    """The rows to plan for, and what there is to say of them."""
    if isinstance(rows, Dataset):
        return rows, ()
    found = Dataset.from_list(list(rows.take(STREAMED_ROWS)))
    return found, (f"a stream is planned for by its first {len(found):,} rows; longer ones may follow",)


def prepared_rows(run: PlannedRun, rows: Dataset) -> tuple[Dataset, Sizes, tuple[str, ...]]:
    """The rows as the trainer would see them, the tokens of its micro-batches, and what there is to say of them.

    Raises:
        ValueError: rows cannot be prepared; one is longer than the model has positions.
    """
    config = run.config({"tokens_per_microbatch": None, **_of_adapters(run)})
    fake = FakeRun(
        run.method,
        config,
        run.described,
        rows,
        prepared=run.prepared,
        processing_class=run.processing_class,
        samples=run.samples,
        teacher_model=run.teacher,
    )
    assembled = fake.assembled(run.device)
    of_positions = _check_positions(run, fake.dataset, assembled)
    return fake.dataset, _sizes_of(run, assembled, fake.dataset), (*fake.notes, *of_positions)


class CountedWeights(NamedTuple):
    """Bytes of the parameters of a model."""

    whole: int
    layer: int
    """Of the smallest layer, which streamed weights hold at least; 0 where layers are not known."""


def counted_weights(run: PlannedRun, rows: Dataset) -> CountedWeights | None:
    """The weights of a run, without a trace; None where it was asked that they be streamed."""
    fake = run.faked(rows, {})
    if fake.config.base_weights == "stream" or streams_trained(fake.config):
        return None
    model, optimizer = fake.model.on_meta(fake.model.layers), optimizer_name(fake.config)
    layers = [predict_states(layer, optimizer).weights for layer in stack_of(model, fake.model.layers) or ()]
    return CountedWeights(predict_states(model, optimizer).weights, min(layers, default=0))


def _of_adapters(run: PlannedRun) -> dict[str, Any]:
    """In place of settings that are refused without adapters, which the model that prepares rows does not have: they
    change no rows, and the traces have adapters."""
    return {"base_weights": "resident"} | ({"optim": "adamw_torch"} if run.requested.get("optim") == LORA_FA else {})


def _check_positions(run: PlannedRun, rows: Dataset, assembled: TrainingRun) -> tuple[str, ...]:
    """What there is to say of prepared rows with more positions than the model was made for.

    Raises:
        ValueError: the model has none for them, as a training would refuse them.
    """
    if (most := made_for(run.described)) is None:
        return ()
    config = run.config({})
    written = config.max_completion_length if run.method.writes else 0
    counted = assembled.row_lengths(rows) if getattr(config, "writes", False) else None
    longest = longest_row(rows, counted) + written
    if longest <= most:
        return ()
    if (table := positions_of(run.described, run.method.head)) is None:
        return beyond(run.described, longest)
    check_positions(rows, table, "train", written, counted)
    return ()


def _sizes_of(run: PlannedRun, assembled: TrainingRun, rows: Dataset) -> Sizes:
    """The tokens of a micro-batch of prepared rows.

    Raises:
        ValueError: there are none.
    """
    lengths, bin_tokens = assembled.row_lengths(rows), run.method.rows.bin_tokens(assembled.args)
    if lengths is None or not len(lengths):
        raise ValueError("the dataset has no rows to plan for: give rows of text, or their lengths")
    config = run.config({})
    (whole,) = heaviest_rows(lengths, -(-config.per_device_train_batch_size // run.method.rows.together(config)), None)
    together = int(lengths[whole].sum())
    longest = max(int(lengths.max()), bin_tokens or 0)
    if run.requested.get("tokens_per_microbatch", "free") != "free":
        budget = run.requested["tokens_per_microbatch"]
        return Sizes(together, together, in_pieces=budget is not None and budget < longest, given=True)
    return Sizes(min(together, longest), together)


def measured(run: PlannedRun, prepared: Dataset, options: Mapping[str, Any], tokens: int | None) -> Estimate:
    """What a trace says of a run with some options and a token budget.

    Raises:
        Refused: they cannot work together or with this model, with the reason.
    """
    budget = {} if tokens is None else {"tokens_per_microbatch": tokens}
    try:
        return estimate_run(run.faked(prepared, {**options, **budget}), run.device)
    except ValueError as reason:
        raise Refused(str(reason)) from reason
