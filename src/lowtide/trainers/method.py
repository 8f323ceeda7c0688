"""What the trainers of all methods do at construction; each of them is a method, a config and its data.

In order: options, model and tokenizer, adapters, data with its ledger, the engine proved on the model, the
reference where the method has one, the objective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from datasets import Dataset, IterableDataset, concatenate_datasets
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from lowtide.data.batches.collate import RaggedCollator
from lowtide.data.report.ledger import Ledger
from lowtide.data.sources.titles import entitled, title_of
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.weights.loading import adapt
from lowtide.memory.table import ActiveTechniques
from lowtide.memory.technique import Site, Technique
from lowtide.methods.method import Method, Objective, Scorer
from lowtide.ranks.same_rows import check_same_rows
from lowtide.run.edge import edge, out_of_memory_while
from lowtide.run.engine import Engine, check_trained, install_engine, router_coefficient
from lowtide.run.inputs.arguments import check_arguments, check_attention, check_dataset, check_kind
from lowtide.run.inputs.loading import config_of, load_inputs
from lowtide.run.inputs.row_checks import check_budget, check_collator, check_masks, position_table
from lowtide.run.options.training import TrainingConfig
from lowtide.step.heaviest import check_positions
from lowtide.step.rank_sync import OutOfMemory
from lowtide.step.runner import StepRunner
from lowtide.trainers.attributes import TrainerAttributes
from lowtide.trainers.base import LowtideTrainer
from lowtide.trainers.budget import Fitted, fit_budget
from lowtide.trainers.older_arguments import take_tokenizer, with_older
from lowtide.trainers.reports.oom_report import explained
from lowtide.trainers.reports.start import StartReport

Prepared = tuple[Any, Ledger | None]


class MethodTrainer(TrainerAttributes, LowtideTrainer):
    """A trainer of one method.

    Args:
        model: a name, a path, a `PreTrainedModel` or a `PeftModel`.
        args: the options; a plain `TrainingArguments` gets the others' defaults.
        data_collator: from prepared rows to a `RaggedBatch`; by default the method's own.
        train_dataset: rows in any format of the method's page in the docs; a stream needs `max_steps`.
        eval_dataset: one, or several by name.
        processing_class: the tokenizer; by default the model's own.
        compute_metrics: gets `EvalPrediction(predictions=log-probs [scores], label_ids=tokens [scores])`.
        quantization_config: for a model given by name.
        peft_config: adapters to put on the model.
        older: arguments that an older TRL had where the config has options today (see `trainers.older_arguments`).

    Raises:
        ValueError: anything that cannot work, before the first step, with what to do.
    """

    method: ClassVar[Method]
    config: ClassVar[type[TrainingConfig]]
    head: ClassVar[type[Head]] = LanguageModel
    """What the method reads off the model's hidden states."""
    needs_tokenizer: ClassVar[bool] = True
    ledger: Ledger | None
    tokenizer: PreTrainedTokenizerBase | None

    @edge("making the trainer")
    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        **older: Any,
    ):
        if train_dataset is None:
            raise ValueError(f"{type(self).__name__} needs a `train_dataset`, and it is None")
        processing_class = take_tokenizer(older, processing_class)
        check_arguments(
            self.config.__name__,
            model=model,
            args=args,
            data_collator=data_collator,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        args = with_older(config_of(self.config, args, model, self.method.name.upper()), older, type(self).__name__)
        self.planned = Fitted({}, "")
        if args.memory_budget:
            self.planned = fit_budget(
                type(self),
                args,
                model,
                train_dataset,
                processing_class=processing_class,
                peft_config=peft_config,
                quantization_config=quantization_config,
            )
        set_seed(args.seed)
        self.args = args
        if getattr(data_collator, "is_default", False):
            data_collator = None
        model = self._loaded(model, processing_class, quantization_config, peft_config)
        self._reads_rows = data_collator is None
        train_dataset, eval_dataset = self._read(model, train_dataset, eval_dataset)
        engine = install_engine(model, args)
        collator = self.collator(args, engine)
        self._own_collator = None if data_collator is None else collator
        site = Site(args, model, args.device, args.world_size)
        self.active = ActiveTechniques(site)
        self.active.prepare()
        aux = router_coefficient(causal_model(model), getattr(args, "router_aux_loss_coef", None))
        runner = StepRunner(
            model,
            self.make_objective(args, aux),
            args,
            reference=self.make_reference(model, engine),
            padding_free=engine.padding_free,
            techniques=self.active,
        )
        super().__init__(
            runner=runner,
            model=model,
            args=args,
            data_collator=data_collator or collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.predicted_bytes = self.planned.peak_bytes
        self.site = site
        self._check_rows("train", self.train_dataset)
        for name, dataset in by_name(self.eval_dataset).items():
            self._check_rows(name, dataset, trained_on=False)
        self.add_callback(StartReport(self, engine))

    @out_of_memory_while("loading the model")
    def _loaded(self, model: Any, processing_class: Any, quantization_config: Any, peft_config: Any) -> nn.Module:
        """The model as it will be trained; the tokenizer with it."""
        args = self.args
        model, self.tokenizer = load_inputs(
            model,
            args,
            processing_class,
            quantization_config,
            has_adapters=peft_config is not None,
            head=self.head,
            needs_tokenizer=self.needs_tokenizer and not getattr(args, "skips_preparation", False),
        )
        if peft_config is not None:
            model = self.put_adapters(model, self.adapters(peft_config), args)
        if getattr(args, "disable_dropout", False):
            disable_dropout(model)
        check_kind(model, head=self.head)
        check_attention(model, args)
        self.check_model(model)
        return model

    # -- what a method's trainer says of itself ----------------------------------------------------------------------

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        """Rows to token rows, with their ledger; `name` is "train", or of an evaluation set."""
        raise NotImplementedError

    def collator(self, args: Any, engine: Engine) -> Callable:
        """From prepared rows to a `RaggedBatch`."""
        return RaggedCollator()

    def make_objective(self, args: Any, aux_coefficient: float) -> Objective:
        """The method's objective under the options."""
        return self.method.objective(args, aux_coefficient=aux_coefficient)

    def make_reference(self, model: nn.Module, engine: Engine) -> Scorer | None:
        """The reference's log-probabilities of a micro-batch, for a method that has one."""
        return None

    @classmethod
    def adapters(cls, peft_config: Any) -> Any:
        """The configuration of adapters as the method needs it."""
        return peft_config

    @out_of_memory_while("making the adapters")
    def put_adapters(self, model: nn.Module, peft_config: Any, args: TrainingConfig) -> nn.Module:
        """The model with adapters on it."""
        return adapt(
            model,
            peft_config,
            gradient_checkpointing=args.gradient_checkpointing,
            checkpointing_kwargs=cast(Any, args.gradient_checkpointing_kwargs),
        )

    def check_model(self, model: nn.Module) -> None:
        """Refuses a model that the method cannot train."""

    def bin_tokens(self, args: Any) -> int | None:
        """The tokens of a packed row, where rows are packed."""
        return None

    @property
    def techniques(self) -> list[Technique]:
        """The memory techniques that are on."""
        return self.active.techniques

    def report_lines(self) -> list[tuple[str, str]]:
        """What the method adds to the start-up report, as (name, text)."""
        return []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a run that stops for want of memory says what would have helped."""
        liger, self.args.use_liger_kernel = self.args.use_liger_kernel, False  # the table has it, without its losses
        try:
            with edge("training"):
                return super().train(*args, **kwargs)
        except OutOfMemory as error:
            raise explained(self, error) from None
        finally:
            self.args.use_liger_kernel = liger

    # -- data --------------------------------------------------------------------------------------------------------

    def _read(self, model: nn.Module, train_dataset: Any, eval_dataset: Any) -> tuple[Any, Any]:
        """Both datasets prepared; the ledger with them."""
        check_trained(model)
        train_dataset, self.ledger = self._prepared(train_dataset, "train")
        return train_dataset, None if eval_dataset is None else self._prepared_for_evaluation(eval_dataset)

    @out_of_memory_while("preparing the dataset")
    def _prepared(self, dataset: Any, name: str) -> Prepared:
        if getattr(self.args, "skips_preparation", False):
            if self._reads_rows:
                check_masks(dataset, title_of(dataset, name))
            return dataset, None
        check_dataset(dataset, f"the {name} dataset")
        if isinstance(dataset, IterableDataset) and name == "train" and self.args.max_steps < 1:
            raise ValueError("a streamed train_dataset has no length: set `max_steps`")
        with self.args.main_process_first(desc=f"preparing the {name} dataset"):
            prepared, ledger = self.prepare(dataset, name)
        return entitled(prepared, title_of(dataset, name)), ledger

    def _prepared_for_evaluation(self, dataset: Any) -> Any:
        """One dataset, or several by name, prepared for evaluation."""
        prepared = {name: with_prompts(each, self._prepared(each, name)[0]) for name, each in by_name(dataset).items()}
        return prepared if isinstance(dataset, Mapping) else prepared["eval"]

    def _check_rows(self, name: str, dataset: Any, *, trained_on: bool = True) -> None:
        """Refuses prepared rows that cannot be run."""
        if dataset is None:
            return
        name = title_of(dataset, name)
        check_same_rows(dataset, self.row_lengths, name)
        budget, positions = self.args.tokens_per_microbatch, position_table(self.model)
        if budget is not None:
            bin_tokens = self.bin_tokens(self.args) if trained_on else None
            check_budget(budget, self.row_lengths(dataset), name, bin_tokens)
        if positions is not None:
            check_positions(dataset, positions, name)
        if self._own_collator is not None:
            title = getattr(self.data_collator, "__name__", type(self.data_collator).__name__)
            wanted = self._get_collator_with_removed_columns(self.data_collator)
            count = min(2, self.args.train_batch_size if trained_on else self.args.eval_batch_size)
            check_collator(lambda rows: self.as_ragged(wanted(rows)), self._own_collator, dataset, count, title, name)

    @edge("evaluating")
    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's; a dataset handed in here may be unprepared."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._handed_in(eval_dataset)
        return super().evaluate(cast(Any, eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the dataset may be unprepared. `predictions` are log-probs of targets and `label_ids` the
        targets, [scores]; logits where a loss of one's own needs them."""
        return super().predict(self._handed_in(test_dataset), *args, **kwargs)

    def _handed_in(self, dataset: Any) -> Any:
        """A dataset that comes after construction, prepared and checked."""
        if dataset is self.eval_dataset:
            return dataset
        dataset = self._prepared_for_evaluation(dataset)
        for name, each in by_name(dataset).items():
            self._check_rows(name, each, trained_on=False)
        return dataset


def by_name(dataset: Any) -> Mapping[str, Any]:
    """Evaluation sets by their names; one alone is "eval"."""
    return dataset if isinstance(dataset, Mapping) else {"eval": dataset}


def with_prompts(rows: Any, prepared: Any) -> Any:
    """Prepared rows with the prompts that they were made of, which callbacks that generate look for; nothing else
    reads them. None where rows were dropped or packed, and prompts would stand beside other rows."""
    if not (isinstance(rows, Dataset) and isinstance(prepared, Dataset)) or len(rows) != len(prepared):
        return prepared
    if "prompt" not in rows.column_names or {"prompt", "seq_lengths"} & {*prepared.column_names}:
        return prepared
    return concatenate_datasets([prepared, rows.select_columns(["prompt"])], axis=1)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of a model to 0, those that attention reads off its config or modules too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "attn_dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
