"""A run put together: from a method, options, a model and data to the object that takes its steps.

In this order: model and tokenizer, adapters, rows with their ledger, the engine proved on the model, techniques, the
reference where the method has one. Trainers and the planner do this alike.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from datasets import IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from lowtide.compat.peft import train_beside_adapters
from lowtide.compat.torch import FakeTensor
from lowtide.data.batches.heaviest import check_positions, longest_row, row_lengths
from lowtide.data.batches.shared_rounds import WholeRounds
from lowtide.data.batches.token_rows import PREFIX
from lowtide.data.report.ledger import Ledger
from lowtide.data.sources.titles import entitled, title_of
from lowtide.data.two_tokenizers import TwoTokenizers
from lowtide.engine.adapters import add_adapter_of, check_second_adapter
from lowtide.engine.forward import causal_model, vocabulary
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.token_value import TokenValue
from lowtide.engine.heads.value import STEP_SEPARATOR, Value
from lowtide.engine.images import run_tower
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.positions import made_for, position_table
from lowtide.engine.vision import encodes_images, freeze_tower
from lowtide.engine.weights.complete_weights import base_of_adapters, new_modules
from lowtide.engine.weights.labels import names_of, set_problem
from lowtide.engine.weights.load_errors import check_dropouts
from lowtide.engine.weights.loading import ASKED_BY_PEFT, WITH_EXPERTS, adapt, check_trained_whole
from lowtide.engine.weights.model_init import model_init
from lowtide.memory.activations.chain_storage import place_maker
from lowtide.memory.activations.spill_file import folder_on_a_disk
from lowtide.memory.table import ActiveTechniques
from lowtide.memory.technique import Site
from lowtide.methods.method import EXPERTS, Labels, Method, Objective, Scorer
from lowtide.methods.shared.rows import Preparation, Prepared
from lowtide.ops.attention.piece_keys import KeyPlace
from lowtide.process.ways_out import in_python
from lowtide.ragged import RaggedBatch
from lowtide.ranks.same_rows import check_same_rows
from lowtide.run.base_dtype import store_base
from lowtide.run.edge import out_of_memory_while
from lowtide.run.engine import (
    Engine,
    check_causal,
    check_prefixes,
    check_trained,
    disable_dropout,
    install_engine,
    router_coefficient,
    zero_config,
)
from lowtide.run.inputs.arguments import check_attention, check_dataset, check_kind
from lowtide.run.inputs.images import (
    check_images,
    check_takes_images,
    image_reader,
    spreads_weights,
)
from lowtide.run.inputs.loading import load_inputs, note_separator, note_turns, set_padding, stop_ids
from lowtide.run.inputs.row_checks import check_budget, check_masks
from lowtide.run.optimizers import check_package
from lowtide.run.references import ReferenceMaker, check_head_taught
from lowtide.run.streamed_weights import check_before_loading, declare_base, stream_frozen, stream_trained, wants_stream
from lowtide.run.teachers import TeacherMaker
from lowtide.score_rules import LastToken, ScoreRule
from lowtide.step.models import why_not_pieces
from lowtide.step.runner import StepRunner
from lowtide.step.updaters.deepspeed import DeepSpeedUpdater
from lowtide.step.updaters.stage_updater import PipelineUpdater
from lowtide.step_plan import LEAST

logger = logging.getLogger(__name__)


@dataclass
class Inputs:
    """What a run is made of beside its options, as a user handed it over."""

    model: Any
    """A name, a path, or a model, with adapters on it or not."""
    processing_class: Any = None
    peft_config: Any = None
    quantization_config: Any = None
    ref_model: Any = None
    data_collator: Callable | None = None
    formatting_func: Callable | None = None
    labels: Sequence[str] = ()
    """Those of the rows, which a model that is given by name gets; none where they are not known."""
    problem: str | None = None
    """What the labels of the rows are, as transformers' `problem_type` names it; None where it does not."""
    needs_tokenizer: bool = True
    """False where the rows are token rows already."""
    adapters_trained: bool = False
    """Whether `peft_config` stands for adapters that came with the model, as in a plan of such a run."""
    adapts: bool = True
    """False puts no adapter on the model, not even one that an option asks for: it is not trained."""


class TrainingRun:
    """A run of one method: the model is loaded when it is made, rows are prepared, and `install` makes it ready.

    Raises:
        ValueError: anything that cannot work, with what to do.
    """

    engine: Engine
    active: ActiveTechniques
    collator: Callable
    aux_coefficient: float
    place: Callable[[], KeyPlace]
    """Makes the place where the keys of rows above the token budget wait."""
    reference_text: str = ""
    """What the start-up report says of the reference; empty for a method without one."""

    def __init__(self, method: Method, args: Any, inputs: Inputs) -> None:
        self.method, self.args, self.inputs = method, args, inputs
        self.ledger: Ledger | None = None
        """Of the training set."""
        self.shows_images = False
        """Whether rows that were prepared show images."""
        self.shares_rounds = False
        """Whether they have segments that go on from others: rounds of a conversation."""
        self.skips_preparation = bool(getattr(args, "skips_preparation", False))
        self._references: ReferenceMaker | None = None
        self._referred: Callable[[], Sequence[nn.Module]] = list
        """The reference, for as long as it is held elsewhere."""
        if inputs.data_collator is not None and method.rows.collates_alone:
            raise ValueError(f"data_collator has no use in {method.title}: {method.rows.collates_alone}")
        if method.head.trains_beside is not None:
            _check_whole(args, method.head.trains_beside)
        if method.compares and args.compares:
            maker = TeacherMaker if method.taught else ReferenceMaker
            self._references = maker(
                args, inputs.ref_model, adapters_came=inputs.peft_config is None or inputs.adapters_trained
            )
            self._references.source = inputs.model if isinstance(inputs.model, str) else None
        elif method.taught and inputs.ref_model is not None:
            raise ValueError(f"a teacher_model was passed, and {args.asked} asks another: leave one of them out")
        self.model, self.tokenizer, self.processing_class = self._loaded()
        check_causal(causal_model(self.model))
        check_dropouts(self._config)
        check_trained(self.model)
        self.tokenizers: TwoTokenizers | None = None
        """The student's tokenizer and the teacher's, where that has its own."""
        if isinstance(self._references, TeacherMaker):
            self.tokenizers = self._references.tokenizers(self.tokenizer, self.model)
        self.reader, self.unread = None, ""
        if method.rows.takes_images:
            try:
                self.reader = image_reader(self.model, self.processing_class)
            except ValueError as error:  # which is no matter where rows show no images
                self.unread = str(error)
        inputs.model = inputs.ref_model = None  # what holds them decides how long they live
        self.vocab_size = vocabulary(self.model)
        self.pad_id = method.head.pad_id(cast(Any, causal_model(self.model)))
        """The token that the head passes over at the end of a row; None if none."""

    @out_of_memory_while("loading the model")
    def _loaded(self) -> tuple[nn.Module, PreTrainedTokenizerBase | None, Any]:
        """The model as it will be trained, the tokenizer, and what it is a part of."""
        args, inputs, method = self.args, self.inputs, self.method
        check_package(args)
        self._check_streamed()
        beside = head_with_adapter(args) if inputs.adapts else None
        if beside is not None:
            check_second_adapter(inputs.peft_config)
        model, tokenizer, processing_class = load_inputs(
            inputs.model,
            args,
            inputs.processing_class,
            inputs.quantization_config,
            has_adapters=inputs.peft_config is not None,
            head=method.head,
            needs_tokenizer=inputs.needs_tokenizer and not self.skips_preparation,
            labels=inputs.labels,
        )
        if getattr(args, "freeze_vision_tower", False):
            freeze_tower(model)
        if inputs.peft_config is not None:
            declare_base(model, args)
        if inputs.problem is not None:
            set_problem(causal_model(model).config, inputs.problem, asked=args.problem_type is not None)
        adds_model = method.head.trains_beside is not None  # which is trained whole, whatever adapters there are
        if beside is None and not adds_model:
            self._attach_head(model)
        if inputs.peft_config is not None:
            model = self._adapted(model, adapters_of(method, args, inputs.peft_config, new_modules(model)))
        if self._references is not None:
            self._references.arrived(model, inputs.peft_config)
        if beside is not None:
            add_adapter_of(model, beside)
        if adds_model:
            method.head.attach(cast(Any, causal_model(model)), args)
        if getattr(args, "disable_dropout", False):
            disable_dropout(model)
        if inputs.adapts:
            store_base(model, args)
        stream_frozen(model, args)
        stream_trained(model, args)
        check_kind(model, head=method.head)
        check_attention(model, args)
        if isinstance(method.head.score_rule(cast(Any, causal_model(model))), LastToken):
            set_padding(causal_model(model), tokenizer, args)  # what the head passes over
        if method.head is Value:
            note_turns(causal_model(model), tokenizer, args)
        if hasattr(args, STEP_SEPARATOR):
            note_separator(causal_model(model), args)
        return model, tokenizer, processing_class

    def _check_streamed(self) -> None:
        """Refuses weights that cannot be streamed, before they are loaded.

        Raises:
            ValueError: says why, and what to do.
        """
        args, inputs = self.args, self.inputs
        if not wants_stream(args):
            return
        adapted = inputs.peft_config is not None or (
            isinstance(inputs.model, str) and base_of_adapters(inputs.model) is not None
        )
        if not isinstance(inputs.model, str):
            adapted |= any(not p.requires_grad for p in inputs.model.parameters())
        others = self._references is not None or self.method.writes is not None
        if not adapted and inputs.adapts and not others:
            raise ValueError(
                "base_weights='stream' streams weights that are not trained, and this run trains all of them: set "
                f"use_peft=True{in_python(' (or pass a `peft_config`)')}, or leave base_weights out"
            )
        init = model_init(
            cast(dict, args.model_init_kwargs),
            trust_remote_code=args.trust_remote_code,
            quantization_config=inputs.quantization_config,
        )
        check_before_loading(inputs.model, args, init, frozen=adapted)

    def _attach_head(self, model: nn.Module) -> None:
        """Adds what the head needs; it is trained whole and saved beside adapters that came with the model."""
        added, inner = self.method.head.added_module, causal_model(model)
        if added is None:
            return
        is_new = not hasattr(inner, added)
        self.method.head.attach(inner, self.args)
        if is_new and inner is not model:
            inner.get_submodule(added).requires_grad_(False)  # as the base; the adapters' copy is trained
            train_beside_adapters(model, added)

    @out_of_memory_while("making the adapters")
    def _adapted(self, model: nn.Module, peft_config: Any) -> nn.Module:
        check_trained_whole(peft_config, model)
        return adapt(
            model,
            peft_config,
            gradient_checkpointing=self.args.gradient_checkpointing,
            checkpointing_kwargs=cast(Any, self.args.gradient_checkpointing_kwargs),
        )

    @property
    def _config(self) -> Any:
        """The model's own."""
        return causal_model(self.model).config

    @property
    def labels(self) -> Labels | None:
        """What is known of the labels that the method's head gives logits of; None where it gives none."""
        if not self.method.rows.labelled:
            return None
        scored = None if self.ledger is None else self.ledger.scored_by_label
        return Labels(names_of(self._config), scored, self._config.problem_type)

    @property
    def score_rule(self) -> ScoreRule:
        """Which positions of a completion are scored."""
        return self.method.head.score_rule(cast(Any, causal_model(self.model)))

    # -- rows --------------------------------------------------------------------------------------------------------

    @out_of_memory_while("preparing the dataset")
    def prepared(self, dataset: Any, name: str) -> Prepared:
        """Token rows of a dataset, and their ledger; `name` is "train", or of an evaluation set."""
        title = title_of(dataset, name)
        check_takes_images(
            *(dataset, title, self.model, self.reader),
            method=self.method.title,
            takes=self.method.rows.takes_images,
            prepared=self.skips_preparation,
            unread=self.unread,
        )
        if self.skips_preparation:
            if self.inputs.data_collator is None:
                check_masks(dataset, title)
            self.shares_rounds |= PREFIX in (getattr(dataset, "column_names", None) or ())
            return dataset, None
        check_dataset(dataset, f"the {name} dataset")
        if isinstance(dataset, IterableDataset) and name == "train" and self.args.max_steps < 1:
            raise ValueError("a streamed train_dataset has no length: set `max_steps`")
        assert self.tokenizer is not None
        how = Preparation(
            self.tokenizer,
            self.args,
            self.vocab_size,
            self.inputs.formatting_func,
            names_of(self._config),
            self._config.problem_type,
            self.reader,
            tuple(stop_ids(self.model, self.tokenizer)),
        )
        with self.args.main_process_first(desc=f"preparing the {name} dataset"):
            rows, ledger = self.method.rows.prepare(dataset, how, name)
        self.shares_rounds |= PREFIX in (rows.column_names or ())
        if self.method.rows.shows_images(rows):
            writes = self.method.writes is not None or bool(getattr(self.args, "writes", False))
            check_images(self.model, self.args, title, writes=writes)
            self.shows_images = True
            self._run_towers()
        return entitled(rows, title), ledger

    def drawn(self, batch: RaggedBatch, epoch: int) -> RaggedBatch:
        """A batch with what is drawn of it in an epoch, by a method that draws something; else as it is."""
        return batch if self._drawing is None else self._drawing(batch, epoch)

    def row_lengths(self, dataset: Any, *, trained: bool = False) -> np.ndarray | None:
        """[rows]: the tokens of each row of a dataset, as batches have them, or those alone that go backward; None for
        a stream."""
        return row_lengths(dataset, self.collator, trained=trained)

    def why_whole(self) -> str | None:
        """What keeps a row above the token budget from being run in pieces, as a clause; None if nothing does."""
        args = self.args
        kwargs: Any = args.gradient_checkpointing_kwargs or {}
        if args.gradient_checkpointing and kwargs.get("use_reentrant"):
            return "reentrant checkpointing (gradient_checkpointing_kwargs) has no graph that pieces could go on from"
        if args.attention_head_chunks:
            return "attention_head_chunks computes a layer's heads one group after the other"
        if self.shows_images:
            return "rows show images, which pieces could cut"
        if self.aux_coefficient:
            return EXPERTS
        if args.tokens_per_microbatch is not None and args.tokens_per_microbatch < LEAST:
            return f"a piece has at least {LEAST} tokens"
        return why_not_pieces(self.model, self._referred() if self.method.taught else ())

    def check_rows(self, name: str, dataset: Any, *, trained_on: bool = True, why_whole: str | None = None) -> None:
        """Refuses prepared rows that cannot be run.

        Args:
            name: what messages call them.
            why_whole: what else keeps them from being run in pieces.
        """
        check_same_rows(dataset, self.row_lengths, name)
        budget = self.args.tokens_per_microbatch
        if budget is not None:
            bin_tokens = self.method.rows.bin_tokens(self.args) if trained_on else None
            check_budget(
                budget, self.row_lengths(dataset), name, bin_tokens, why_whole=lambda: why_whole or self.why_whole()
            )
        models = [("the model", self.model)]
        if self._references is not None:
            models += [(self._references.what, each) for each in self._referred() if each is not self.model]
        tables = {whose: most for whose, model in models if (most := position_table(model)) is not None}
        written = self.args.max_completion_length if self.method.writes else 0
        lengths = self.row_lengths(dataset) if tables and getattr(self.args, "writes", False) else None
        for whose, positions in tables.items():
            check_positions(dataset, positions, name, written, lengths, whose=whose)
        if not tables and self.method.writes is None:  # what is written says so itself
            self._tell_of_positions(name, dataset)

    def _tell_of_positions(self, name: str, dataset: Any) -> None:
        """Warns of rows behind the positions that a model was made for, where it computes positions and goes on."""
        known, longest = made_for(self._config), longest_row(dataset)
        if known is not None and longest > known:
            logger.warning(
                f"rows of {name}, of up to {longest:,} tokens, go past the {known:,} positions that the model was made "
                f"for (max_position_embeddings): it does badly there, and learns it slowly. Set max_length={known}, or "
                "take a model with more"
            )

    def _run_towers(self) -> None:
        """Has all ranks run vision towers equally often, where they share weights or gradients."""
        if self.shows_images and spreads_weights(self.args):
            for model in (self.model, *self._referred()):
                if encodes_images(model):
                    run_tower(causal_model(model), True)

    # -- the step ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Installs the engine, proved on the model, and what techniques change in it."""
        args, inputs = self.args, self.inputs
        if args.sharding.cuts_weights and self._references is not None:
            self._references.set_aside(self.model)
        self.engine = install_engine(self.model, args, self.reader if self.shows_images else None)
        shares = self.method.rows.completions or self.method.writes or self.shares_rounds
        sharing = bool(shares) and check_prefixes(self.engine, self.model, args, rounds=self.shares_rounds)
        self._shares = sharing
        self.own_collator = self.method.rows.collator(
            args, sharing=sharing, score_rule=self.score_rule, reader=self.reader
        )
        self.collator = inputs.data_collator or self.own_collator
        if self.shares_rounds and not sharing:
            self.collator = WholeRounds(self.collator)
        self._drawing = self.method.rows.drawing(args, self.tokenizer, self.vocab_size, self.reader)
        self.active = ActiveTechniques(Site(args, self.model, args.device, args.world_size, self._compared))
        self.active.prepare()
        folder = args.activation_offloading_dir or folder_on_a_disk(args.output_dir)
        self.place = place_maker(args.chain_storage, self.model, args.device, folder)
        coefficient = getattr(args, "router_aux_loss_coef", None)
        self.aux_coefficient = router_coefficient(cast(Any, causal_model(self.model)), coefficient, args.sharding)

    def _compared(self) -> Sequence[nn.Module]:
        """What the model is compared with, once it is made."""
        return self._referred()

    def make_reference(self) -> Scorer | None:
        """The reference, for a method that has one."""
        if self._references is None:
            return None
        self._references.sees_images, self._references.sees_prefixes = self.shows_images, self._shares
        made = self._references.make(self.model, self.tokenizer, self.engine)
        if self.objective().taught:
            check_head_taught(made.scorer)
        self.reference_text, held = made.text, [weakref.ref(each) for each in made.scorer.models]
        self._referred = lambda: [model for each in held if (model := each()) is not None]
        self._run_towers()
        return made.scorer

    def objective(self) -> Objective:
        """The method's objective under the options."""
        known: dict[str, Any] = {} if self.labels is None else {"labels": self.labels}
        known |= {} if self.tokenizers is None else {"common": self.tokenizers.common}
        return self.method.objective(self.args, aux_coefficient=self.aux_coefficient, **known)

    def runner(self, objective: Objective, reference: Scorer | None = None) -> StepRunner:
        """What takes the run's steps."""
        updater = None
        if self.args.zero_config is not None and not isinstance(next(self.model.parameters()), FakeTensor):
            updater = DeepSpeedUpdater(zero_config(self.model, self.args), self.args.device)
        if (stage := stage_of(causal_model(self.model))) is not None:
            updater = PipelineUpdater(stage)
        return StepRunner(
            self.model,
            objective,
            self.args,
            reference=reference,
            padding_free=self.engine.padding_free,
            updater=updater,
            techniques=self.active,
            place=self.place,
        )


def _check_whole(args: Any, other: str) -> None:
    """Refuses layers or a vocabulary that ranks split, as the model that is trained beside cannot be."""
    why = None
    if (ranks := args.sharding.tensor_parallel) > 1:
        why = f"layers cannot be split between {ranks} ranks yet beside {other}: shard by fsdp=True in place of tp_size"
    elif (ranks := args.sharding.pipeline_parallel) > 1:
        why = (
            f"layers cannot be split over {ranks} ranks yet beside {other}: shard by fsdp=True in place of "
            "pipeline_parallel_size"
        )
    elif args.fsdp_split_vocabulary:
        why = (
            f"fsdp_split_vocabulary=True splits the head by rows, and a vocabulary that {other} and the model share is "
            "whole: leave it out"
        )
    if why is not None:
        raise ValueError(f"{type(args).__name__}: {why}")


def head_with_adapter(args: Any) -> type[Head] | None:
    """The head that has an adapter of its own, beside the policy's."""
    return TokenValue if getattr(args, "value_adapter", False) else None


def adapters_of(method: Method, args: Any, peft_config: Any, new_modules: Sequence[str] = ()) -> Any:
    """The configuration of the policy's adapters as a method needs it: it says the task, and a new head that is read
    through them is trained whole, with all `new_modules` that began with random values, which would be lost with the
    base."""
    if head_with_adapter(args) is not None:
        return peft_config
    task = getattr(peft_config, "task_type", None)
    added, known = method.head.added_module, list(getattr(peft_config, "modules_to_save", None) or [])
    if method.head.trains_beside is not None:
        added = None  # a model of its own, which is saved as one
    wanted = [added, *new_modules] if method.rows.labelled else [added]
    lacking = [name for name in wanted if name is not None and name not in known]
    if lacking:
        peft_config = copy.copy(peft_config)
        peft_config.modules_to_save = [*known, *lacking]
    says_another = task not in (None, LanguageModel.task_type)
    if says_another and task != method.head.task_type:
        logger.warning(
            f"the adapters' {in_python('', 'lora_')}task_type={getattr(task, 'value', task)!r} is saved with the "
            "adapters, by which others load another model than the one that is trained: take "
            f"{method.head.task_type!r}, or leave it out"
        )
    if method.head is LanguageModel or says_another or method.head.new_module in known:
        return peft_config
    peft_config = copy.copy(peft_config)
    peft_config.task_type = method.head.task_type  # by which its base is loaded, and PEFT trains a new head whole
    excluded = getattr(peft_config, "exclude_modules", None) or []
    all_linear = getattr(peft_config, "target_modules", None) in ("all-linear", WITH_EXPERTS)
    if method.head.new_module is not None and all_linear and isinstance(excluded, list):
        # PEFT would adapt the head of a token classifier too, which is trained whole under either name.
        peft_config.exclude_modules = [*excluded, *sorted({method.head.new_module, *ASKED_BY_PEFT})]
    return peft_config
