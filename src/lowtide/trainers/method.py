"""The trainer of any method: at construction options, model, data and engine are put together as `lowtide.run` does."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, cast

from datasets import Dataset, concatenate_datasets
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lowtide.data.batches.completion_rounds import round_features
from lowtide.data.report.ledger import Ledger
from lowtide.data.sources.titles import title_of
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import Head
from lowtide.engine.weights.loading import said_problem
from lowtide.engine.weights.model_init import model_init
from lowtide.memory.technique import Site, Technique
from lowtide.methods.method import OWN, Findings, Method, Objective
from lowtide.methods.shared.rows import Prepared, RowLayout
from lowtide.ragged import RaggedBatch
from lowtide.ranks.same_run import check_same_run
from lowtide.run.inputs.arguments import ARGUMENTS, check_arguments
from lowtide.run.inputs.beginning import beginning_of
from lowtide.run.inputs.first_look import look_at_rows, tokenizer_of
from lowtide.run.inputs.loading import config_of
from lowtide.run.inputs.row_checks import check_collator
from lowtide.run.options.inherited_checks import check_early_stopping, check_starts
from lowtide.run.options.training import TrainingConfig
from lowtide.run.training_run import Inputs, TrainingRun
from lowtide.run.unwise import unwise
from lowtide.score_rules import NEXT_TOKEN, ScoreRule
from lowtide.trainers.attributes import set_options
from lowtide.trainers.budget import Fitted, fit_budget
from lowtide.trainers.callbacks.bema import BEMACallback
from lowtide.trainers.checkpoints.output_folder import check_output, model_of_others
from lowtide.trainers.hooks import LowtideTrainer, public_call
from lowtide.trainers.losses.own_loss import OF_TRAINING
from lowtide.trainers.older_arguments import take_tokenizer, with_older
from lowtide.trainers.reports.start import StartReport
from lowtide.trainers.signatures import DEFAULTS

logger = logging.getLogger(__name__)


class MethodTrainer(LowtideTrainer):
    """A trainer of one method. The arguments are TRL's of the method's trainer, in its order.

    Args:
        model: a name, a path, a `PreTrainedModel` or a `PeftModel`.
        ref_model: the reference, if it is not the model as it is before training; a model, a name or a path.
        teacher_model: whom a student is distilled from; likewise.
        args: the options; a plain `TrainingArguments` gets the others' defaults.
        data_collator: from prepared rows to a `RaggedBatch`; by default the method's own. For texts, one of another
            library may return `input_ids` and `labels`.
        train_dataset: rows in any format of the method's page in the docs; a stream needs `max_steps`.
        eval_dataset: one, or several by name.
        processing_class: the tokenizer, or the processor of a vision-language model; by default the model's own.
        compute_loss_func: as `transformers.Trainer` calls it, on dense logits of padded batches.
        compute_metrics: gets `EvalPrediction(predictions=log-probs [scores], label_ids=tokens [scores])`.
        preprocess_logits_for_metrics: what is kept of the logits for `compute_metrics`, where a loss of one's own
            needs them.
        quantization_config: for a model given by name.
        peft_config: adapters to put on the model.
        formatting_func: called with a row, returns its text or its messages.
        model_init: called for the model where `model` is left out, after the seed is set.
        older: arguments that an older TRL had where the config has options today (see `trainers.older_arguments`).

    Raises:
        ValueError: anything that cannot work, before the first step, with what to do.
    """

    method: ClassVar[Method]
    config: ClassVar[type[TrainingConfig]]
    __signature__: ClassVar[inspect.Signature]
    training_run: TrainingRun
    model: PreTrainedModel | PeftModel
    is_encoder_decoder: ClassVar[bool] = False
    needs_tokenizer: ClassVar[bool] = True
    """False where a subclass's `prepare` takes token rows as they are."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config" in vars(cls):
            set_options(cls)

    @public_call("making the trainer")
    def __init__(self, *positional: Any, **named: Any) -> None:
        given, older = self._arguments(positional, named)
        if given["train_dataset"] is None:
            raise ValueError(f"{type(self).__name__}: `train_dataset` is required, and it is None")
        given["processing_class"] = take_tokenizer(older, given["processing_class"])
        maker = older.pop("model_init", None)
        begins = maker is None and given["model"] is None and getattr(given["args"], "begins_at_random", False)
        later = begins or maker is not None
        known = {name: given[name] for name in ARGUMENTS if name in given and not (later and name == "model")}
        check_arguments(self.config.__name__, **known)
        for name in ("model", "ref_model", "teacher_model"):
            if isinstance(given.get(name), os.PathLike):
                given[name] = os.fspath(given[name])
        args = config_of(self.config, given["args"], given["model"], self.method.name.upper())
        self.args = args = with_older(args, older, type(self).__name__)
        check_early_stopping(given["callbacks"], args)
        check_starts(args, given["eval_dataset"])
        models = {name: given.get(name) for name in MODELS}
        check_output(Path(str(args.output_dir)), models, saves=args.save_strategy != "no")
        check_same_run({each.name: getattr(args, each.name) for each in fields(args) if each.init})
        if maker is not None:
            given["model"] = _made_by(maker, given["model"], args)
        if begins:
            given["model"] = beginning_of(args, given["train_dataset"], given["processing_class"])
        elif getattr(args, "begins_at_random", False):
            raise ValueError(
                "a model came with config_name or model_type, which are of one that begins with random weights: pass "
                "model=None, or leave these out"
            )
        self._look_at_rows(given)
        self.planned = self._plan(given)
        set_seed(args.seed)
        given["data_collator"] = getattr(given.get("data_collator"), "of_trainer", given.get("data_collator"))
        inputs = _inputs(given, self.method.rows, args, needs_tokenizer=self.needs_tokenizer)
        self.training_run = run = TrainingRun(self.method, args, inputs)
        train_dataset, run.ledger = self.prepare(given["train_dataset"], "train")
        eval_dataset = None if given["eval_dataset"] is None else self._prepared(given["eval_dataset"])
        run.install()
        runner = run.runner(self.make_objective(args, run.aux_coefficient), run.make_reference())
        super().__init__(
            runner=runner,
            model=run.model,
            args=args,
            data_collator=run.collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=run.processing_class,
            **{name: given[name] for name in OF_TRAINER if name in given},
        )
        if "compute_loss_func" in given:
            self._take_loss(given["compute_loss_func"], given["preprocess_logits_for_metrics"])
        self.predicted_bytes = self.planned.peak_bytes
        self._check_rows("train", self.train_dataset)
        for name, dataset in by_name(self.eval_dataset).items():
            self._check_rows(name, dataset, trained_on=False)
        self.start_report = StartReport(cast(Any, self), run.engine)
        self.add_callback(self.start_report)
        self._tell_callbacks()
        self._advise()

    def _tell_callbacks(self) -> None:
        for each in self.callback_handler.callbacks:
            if isinstance(each, BEMACallback):
                each.belongs_to(self)

    def _advise(self) -> None:
        """Says what is unwise in the run."""
        run, given = self.training_run, self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        rows = self.train_dataset if self.method.writes is None else None
        others = model_of_others(Path(str(self.args.output_dir)))
        found = unwise(self.args, run.model, aux_coefficient=run.aux_coefficient, given=given, rows=rows)
        for advice in (*([others] if others else []), *found):
            logger.warning(advice)

    def _arguments(self, positional: tuple, named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the arguments by name, with defaults; those of an older TRL).

        Raises:
            TypeError: as Python says it, of too many arguments, or one twice.
        """
        if not positional and "model_init" in named:
            named = {"model": None, **named}
        bound = self.__signature__.bind(*positional, **named)
        given = {name: bound.arguments.get(name, DEFAULTS.get(name)) for name in self.__signature__.parameters}
        return given, given.pop("older") or {}

    def _look_at_rows(self, given: dict[str, Any]) -> None:
        """Prepares the first rows, before the weights of a model that is given by name are read. The tokenizer is that
        of the run."""
        args = self.args
        prepares = type(self).prepare is MethodTrainer.prepare and not getattr(args, "skips_preparation", False)
        if not prepares or not isinstance(given["model"], str) or given.get("formatting_func") is not None:
            return
        if given["processing_class"] is None:
            given["processing_class"] = tokenizer_of(given["model"], args)
        evaluated = {} if given["eval_dataset"] is None else by_name(given["eval_dataset"])
        datasets = {"train": given["train_dataset"], **evaluated}
        look_at_rows(self.method, args, given["processing_class"], datasets)

    def _plan(self, given: Mapping[str, Any]) -> Fitted:
        """The settings that `memory_budget` chooses, set in the config."""
        if self.args.memory_budget is None:
            return Fitted({}, "")
        plainly = self.own_loss.evaluates(predicts=True) or given.get("preprocess_logits_for_metrics") is not None
        return fit_budget(
            self.method,
            self.args,
            given["model"],
            given["train_dataset"],
            whole_rows=plainly,
            **self._to_plan(given),
        )

    def _to_plan(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What a plan knows beside model and rows."""
        return {name: given[name] for name in ("processing_class", "peft_config", "quantization_config")}

    def _take_loss(self, compute_loss_func: Callable | None, preprocess_logits: Callable | None) -> None:
        if compute_loss_func is not None and self.training_run.shows_images:
            raise ValueError(
                "compute_loss_func is called on padded rows of text, and these are rows with images: leave it out, or "
                "override make_objective, whose loss gets log-probabilities"
            )
        self.compute_loss_func, self.preprocess_logits_for_metrics = compute_loss_func, preprocess_logits
        self.objective = self.own_loss.in_place_of(self.inner_objective)

    def ended_early(self) -> None:
        with contextlib.suppress(Exception):  # what ended the training is what is told
            self.start_report.write_page()

    # -- what a subclass may override --------------------------------------------------------------------------------

    def prepare(self, dataset: Any, name: str) -> Prepared:
        """Token rows of a dataset, with their ledger; `name` is "train", or of an evaluation set."""
        return self.training_run.prepared(dataset, name)

    def make_objective(self, args: Any, aux_coefficient: float) -> Objective:
        """The method's objective under the options."""
        return self.training_run.objective()

    # -- what the run knows ------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger | None:
        """Where the tokens of the training set came from."""
        return self.training_run.ledger

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.training_run.tokenizer

    @property
    def padding_value(self) -> int | None:
        """The tokenizer's padding token; batches have no padding."""
        return None if self.tokenizer is None else cast(Any, self.tokenizer).pad_token_id

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is a part of the loss."""
        return self.inner_objective.aux_coefficient != 0

    @property
    def router_aux_loss_coef(self) -> float:
        """Its weight."""
        return self.inner_objective.aux_coefficient

    @property
    def site(self) -> Site:
        """Where techniques work."""
        return self.training_run.active.site

    @property
    def techniques(self) -> list[Technique]:
        """The memory techniques that are on."""
        return self.training_run.active.techniques

    def why_idle(self, technique: Technique) -> str | None:
        """Why one of them does nothing here, as it was when the run was made; None where it works."""
        return self.training_run.active.idle(technique)

    @property
    def head(self) -> type[Head]:  # type: ignore[override]
        """What the method reads off the model's hidden states."""
        return self.method.head

    @property
    def pad_id(self) -> int | None:
        """The token that a value is not read at."""
        return self.training_run.pad_id

    @property
    def plain_completions(self) -> int | None:
        """Completions in the rows of padded inputs, 0 for texts; None where a loss cannot be one's own."""
        return self.method.rows.completions if self.method.own_loss else None

    @property
    def loss_types(self) -> list[str]:
        """The losses whose weighted sum is taken."""
        return getattr(self.args, "loss_types", None) or [cast(Any, self.args).loss_type]

    @property
    def score_rule(self) -> ScoreRule:
        """Where the labels of a collator of another library are predicted."""
        return self.training_run.score_rule if self.method.rows.labelled else NEXT_TOKEN

    def findings(self) -> Findings | None:
        """The method's metrics of an evaluation that need all of its scores at once."""
        labels = self.training_run.labels
        return None if self.method.findings is None or labels is None else self.method.findings(self.args, labels)

    def report_lines(self) -> list[tuple[str, str]]:
        """What the method adds to the start-up report, as (name, text)."""
        return []

    def metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = super().metrics_of(sums)
        derived = self.method.derived_metrics
        return metrics if derived is None else metrics | derived(metrics)

    @property
    def rows_together(self) -> int:
        return self.method.rows.together(self.args)

    # -- data --------------------------------------------------------------------------------------------------------

    def drawn(self, batch: RaggedBatch, epoch: int) -> RaggedBatch:
        return self.training_run.drawn(batch, epoch)

    def kept_columns(self) -> list[str]:
        rows = self.method.rows
        other = self.training_run.inputs.data_collator is not None and rows.labelled
        wanted = [] if other else list(rows.values())
        if rows.completions:
            completions = rows.columns(self.args)
            wanted += ["prompt_ids", *completions, *round_features(completions), "ref_logprobs", "number"]
        return list(dict.fromkeys([*super().kept_columns(), *wanted]))

    def _prepared(self, dataset: Any) -> Any:
        """One dataset, or several by name, prepared for evaluation."""
        if isinstance(dataset, Mapping) and not dataset:
            raise ValueError("eval_dataset is a mapping without a dataset: give it one, or leave it out")
        prepared = {name: with_prompts(each, self.prepare(each, name)[0]) for name, each in by_name(dataset).items()}
        return prepared if isinstance(dataset, Mapping) else prepared["eval"]

    def _check_rows(self, name: str, dataset: Any, *, trained_on: bool = True) -> None:
        """Refuses prepared rows that cannot be run."""
        if dataset is None:
            return
        name, run = title_of(dataset, name), self.training_run
        own = self.own_loss
        plain = own.parts(*OF_TRAINING) if trained_on else own.evaluates(predicts=True)
        if plain:
            own.check_rows(name, dataset)
        run.check_rows(name, dataset, trained_on=trained_on, why_whole=OWN if plain else None)
        if run.inputs.data_collator is not None:
            given = getattr(self.data_collator, "__self__", self.data_collator)
            title = getattr(given, "__name__", type(given).__name__)
            wanted = self._get_collator_with_removed_columns(self.data_collator)
            count = min(2, self.args.train_batch_size if trained_on else self.args.eval_batch_size)
            check_collator(lambda rows: self.as_ragged(wanted(rows)), run.own_collator, dataset, count, title, name)

    def handed_in(self, dataset: Any) -> Any:
        if dataset is self.eval_dataset:
            return dataset
        dataset = self._prepared(dataset)
        for name, each in by_name(dataset).items():
            self._check_rows(name, each, trained_on=False)
        return dataset


def _made_by(model_init: Any, model: Any, args: TrainingConfig) -> Any:
    """The model that `model_init` makes, after the seed is set, as `transformers.Trainer` calls it: with no trial.

    Raises:
        ValueError: there is a model too, it takes other arguments, or none is made.
    """
    if model is not None:
        raise ValueError("a model came as `model` and as `model_init`: leave one of them out")
    if not callable(model_init):
        raise ValueError(f"model_init={model_init!r} must be a function that returns a model")
    arguments = _trial_for(model_init)
    set_seed(args.seed)
    made = model_init(*arguments)
    if made is None:
        raise ValueError("model_init returned None: return the model")
    return made


def _trial_for(model_init: Callable[..., Any]) -> list[None]:
    """The arguments that `model_init` is called with: the trial, which is None, where it takes one.

    Raises:
        ValueError: it needs others.
    """
    signature = inspect.signature(model_init)
    for arguments in ([None], []):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return arguments
    raise ValueError(
        f"model_init is called with a trial or with nothing, and takes {signature}: leave its arguments out"
    )


OF_TRAINER = ("compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs")
"""Arguments that are handed on to `transformers.Trainer` as they are."""
MODELS = ("model", "ref_model", "teacher_model", "value_model")
"""Arguments that may be the path of a model."""
OF_RUN = (
    *("model", "ref_model", "processing_class", "peft_config", "quantization_config", "data_collator"),
    "formatting_func",
)
"""Arguments that a run is made of."""


def _inputs(given: Mapping[str, Any], layout: RowLayout, args: Any, *, needs_tokenizer: bool) -> Inputs:
    named = {name: given[name] for name in OF_RUN if name in given}
    if "teacher_model" in given:
        named["ref_model"] = given["teacher_model"]
    rows = given["train_dataset"]
    said = None
    if layout.labelled:
        model, code = named["model"], args.trust_remote_code
        said = said_problem(
            model if isinstance(model, str) else causal_model(model),
            model_init(args.model_init_kwargs, trust_remote_code=code),
        )
    of_rows = {"labels": layout.labels(rows, args, said=said), "problem": layout.problem(rows, args, said=said)}
    return Inputs(**named, **of_rows, needs_tokenizer=needs_tokenizer)


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
