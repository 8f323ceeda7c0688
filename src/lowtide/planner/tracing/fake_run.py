"""One optimizer step of a run on tensors without memory, and everything that its storages did.

Nothing is predicted here by formula: the run is put together as ever, adapters, techniques and reference included, on a
model whose weights are fake, and its own step runs, after the states of the step before have been made.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack
from unittest.mock import patch

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig

from lowtide.compat.peft import without_bitsandbytes
from lowtide.compat.torch import FakeTensorMode, tree_leaves, without_modes
from lowtide.compat.transformers import place_on
from lowtide.data.batches.heaviest import heaviest_batch, rows_in_a_step
from lowtide.data.batches.images import ImageReader
from lowtide.data.batches.masking import EVALUATION
from lowtide.data.batches.prompted import prompt_images, prompts_of
from lowtide.data.prompts import TEACHER_IDS
from lowtide.data.sources.sampling import sampling
from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.engine.over_ranks.splitting import split_traced
from lowtide.engine.weights.generation_copy import GenerationCopy
from lowtide.engine.weights.labels import set_labels, set_problem
from lowtide.engine.weights.model_init import model_init
from lowtide.engine.weights.reference_storage import STORAGES
from lowtide.memory.activations import offloading
from lowtide.memory.activations.checkpointing import checkpointed_share
from lowtide.memory.allocators import host_heap
from lowtide.memory.optimizers.states import IN_BFLOAT16, optimizer_name, states_of, wants_room
from lowtide.methods.method import Method
from lowtide.ops.target import planning_for, taking
from lowtide.planner.devices import Device
from lowtide.planner.sharding.layout import Layout
from lowtide.planner.speed import OperationCosts
from lowtide.planner.tracing.described_model import DescribedModel
from lowtide.planner.tracing.faked import faked
from lowtide.planner.tracing.following import follow_layers, follow_phases, keys_followed, label, stack_of
from lowtide.planner.tracing.generation_copies import planned_copy
from lowtide.planner.tracing.host_memory import followed_to_the_host, weights_go, weights_wait, with_transfers
from lowtide.planner.tracing.known_results import KnownResults
from lowtide.planner.tracing.reward_models import NO_REWARD_MODELS, DescribedRewards, make_reward_models
from lowtide.planner.tracing.rollouts import TracedCompletions, TracedPrompt, TracedRollout, TracedWriting
from lowtide.planner.tracing.split_tokens import TracedSlice
from lowtide.planner.tracing.substitutes.four_bit import check_four_bit, store_in_four_bits
from lowtide.planner.tracing.substitutes.package_optimizers import as_stepped, pages_states
from lowtide.planner.tracing.substitutes.stand_ins import as_on
from lowtide.planner.tracing.teachers import DescribedTeacher
from lowtide.planner.tracing.trace import ROWS, Event, StorageTrace
from lowtide.planner.tracing.unroll import TRACED_LAYERS, UnlikeLayers, unrolled
from lowtide.ragged import RaggedBatch
from lowtide.run.optimizers import make_optimizer, streams_trained
from lowtide.run.training_run import Inputs, TrainingRun, adapters_of, head_with_adapter
from lowtide.spelling import check_arguments_known
from lowtide.step.metrics import Totals
from lowtide.step.runner import StepRunner
from lowtide.step_plan import Limits, cut_rows

B = TypeVar("B")
SAMPLE = 512
"""Rows that stand for a larger dataset which is not prepared yet."""

_turns: dict[str, int] = {}
"""By a model's config, how many of its layers counted as one when it was traced before."""

VLLM_NOT_COUNTED = (
    "vLLM's own memory in this process is not counted: add vllm_gpu_memory_utilization times the device's memory"
)


class ModelInputs(TypedDict, total=False):
    """What a run is made of beside its model, options and rows."""

    processing_class: Any
    """The tokenizer; by default the model's own."""
    peft_config: Any
    """Adapters to put on the model."""
    adapters_trained: bool
    """Whether they come with the model, trained before: a reference is the model with them then, and holds a copy."""
    quantization_config: Any
    """How its weights are stored: a `BitsAndBytesConfig` with `load_in_4bit`, for QLoRA."""
    teacher_model: Any
    """Of a method with one, as the trainer takes it, its config, or a `DescribedTeacher`; by default the one that the
    options name."""


class RunInputs(ModelInputs, total=False):
    """The same of a run whose policy may write."""

    reward_funcs: Any
    """What rewards completions, as the trainer takes it, or the config of a reward model. A function takes nothing;
    a reward model takes its weights, and a forward."""


@dataclass(frozen=True)
class TracedRun:
    """What was seen of a run, with all its layers."""

    events: Sequence[Event]
    """In parts: "loading", "rollout", "room", "gradients", "step", "states", "optimizer", "clear", "evaluation",
    "saving", "end"."""
    costs: Mapping[str, OperationCosts]
    """Of a micro-batch, of its head, of an optimizer step; of one of the ranks that split its tokens."""
    tokens: int
    """Of a micro-batch."""
    micro_batches: int
    """In an optimizer step."""
    head_share: float = 1.0
    """How many times the scores that were traced there are."""
    notes: tuple[str, ...] = ()

    def micro_batch_seconds(self, device: Device) -> float:
        """Of one micro-batch, by a roofline over the operations; what ranks that split its tokens wait for included."""
        return self.costs["layers"].seconds(device) + self.head_share * self.costs["head"].seconds(device)

    def tokens_per_second(self, device: Device) -> float:
        """On one device that trains by itself."""
        step = self.costs["optimizer"].seconds(device)
        return self.tokens * self.micro_batches / (self.micro_batch_seconds(device) * self.micro_batches + step)

    @property
    def sent_bytes(self) -> int:
        """That a rank sends to those that split the tokens with it, in one micro-batch."""
        return self.costs["layers"].sent_bytes + self.costs["head"].sent_bytes


@dataclass(frozen=True)
class StepRows:
    """The rows of an optimizer step, which are copied to the device at its start and lie there until its end."""

    micro_batches: int
    bytes: int
    """Of their tensors, without the pixels of images."""
    pinned: bool
    """Whether they are copied from page-locked memory."""

    @contextlib.contextmanager
    def copied(self, trace: StorageTrace) -> Iterator[None]:
        """They are copied there, and go in the end."""
        if self.pinned:
            trace.returned(trace.leaves(self.bytes))
        with trace.owned_by(ROWS), trace.during("forward"):
            there = torch.empty(self.bytes, dtype=torch.uint8)
        yield
        del there


class FakeRun:
    """A run in which tensors have no memory.

    Args:
        method: how it trains.
        config: its options.
        described: the model's config.
        dataset: rows as a trainer takes them.
        prepared: whether the rows are token rows already.
        samples: whether a sample may stand for rows that have yet to be prepared.
        rewards: the reward models, of a method whose policy writes.
        inputs: see `ModelInputs`.

    Raises:
        ValueError: weights are stored, or stepped, in a way that is not traced.
    """

    def __init__(
        self,
        method: Method,
        config: Any,
        described: PretrainedConfig,
        dataset: Dataset,
        *,
        prepared: bool = False,
        samples: bool = True,
        rewards: DescribedRewards = NO_REWARD_MODELS,
        **inputs: Unpack[ModelInputs],
    ) -> None:
        check_arguments_known("a run", inputs, ModelInputs.__annotations__)
        check_four_bit(inputs.get("quantization_config"), inputs.get("peft_config"))
        # A run writes into what it is given. Copies of all of it are traced, so that the real run finds its own
        # as they were.
        self.config, self.described, self.dataset, inputs = copy.deepcopy((config, described, dataset, inputs))
        said = getattr(self.described, "problem_type", None)
        labels = method.rows.labels(dataset, config, said=said)
        if labels:
            set_labels(self.described, labels)
        if (problem := method.rows.problem(dataset, config, said=said)) is not None:
            set_problem(self.described, problem, asked=True)
        self.processing_class, self.peft_config = inputs.get("processing_class"), inputs.get("peft_config")
        self.adapters_trained = bool(inputs.get("adapters_trained"))
        self.quantization_config = inputs.get("quantization_config")
        self.method, self.prepared, self.gathers = method, prepared, False
        self.samples = samples and not getattr(config, "packing", False)  # a sample may not fill a batch of bins
        self.rewards, self.teacher = rewards, DescribedTeacher.of(inputs.get("teacher_model"), self.config)
        self.sequence_parallel = 1
        self.notes: tuple[str, ...] = ()
        self.rehearsal = bool(config.rehearsal)
        self.evaluates, self.saves = (
            str(getattr(when, "value", when)) != "no" for when in (config.eval_strategy, config.save_strategy)
        )
        self.precomputed = getattr(config, "precompute_ref_log_probs", False)
        self.config.rehearsal, self.config.eval_strategy, self.config.do_eval = False, "no", False
        if self.precomputed:
            self.config.precompute_ref_log_probs = False
        self.config.use_cpu = True  # where fake tensors lie, on a machine with a GPU too
        place_on(self.config, torch.device("cpu"))

    def of(self, described: PretrainedConfig, teacher: DescribedTeacher | None = None) -> FakeRun:
        """The same run of another model, with another teacher."""
        other = copy.copy(self)
        other.described, other.teacher = described, teacher
        return other

    def gathering(self, gathers: bool) -> FakeRun:
        """The same run, whose layers take and free memory for their weights, or do not."""
        other = copy.copy(self)
        other.gathers = gathers
        return other

    def split(self, ranks: int) -> FakeRun:
        """The same run on one of so many ranks that split the tokens of a micro-batch."""
        other = copy.copy(self)
        other.sequence_parallel = ranks
        return other

    @property
    def model(self) -> DescribedModel:
        """What is trained."""
        adapters, beside = copy.deepcopy(self.peft_config), None
        if adapters is not None:
            adapters, beside = adapters_of(self.method, self.config, adapters), head_with_adapter(self.config)
        return DescribedModel(self.described, self._dtype, self.method.head, self.quantization_config, adapters, beside)

    def assembled(self, device: Device) -> TrainingRun:
        """The run with its rows prepared, of one layer, which no adapter is put on; as it is refused on a device."""
        place = planning_for(device.kind, device.capability) if device.kind == "cuda" else contextlib.nullcontext()
        with faked(), place:
            # In float32, since weights in 16 bits may be refused that are frozen under adapters.
            model = replace(self.model, dtype=torch.float32, quantization_config=None).of_layers(1)
            return self._assembled(model, None, adapts=False)

    def layout(self) -> Layout:
        """The parameters of the whole model, adapters included."""
        return self._layout(self.model)

    def reference_layout(self) -> Layout:
        """The parameters of a whole reference: a teacher's, or those of a copy of the model."""
        described = [replace(self.model, peft_config=None, beside=None)]
        if self.teacher is not None:
            described = [each.model(self._dtype) for each in self.teacher.each]
        return Layout.joined([self._layout(each) for each in described])

    def _layout(self, model: DescribedModel) -> Layout:
        return Layout.of(model.on_meta(model.layers), optimizer_name(self.config))

    def traced(self, device: Device) -> TracedRun:
        """Loading, and a step on the heaviest micro-batch of the data, as they would be on a device.

        Raises:
            ValueError: an operation cannot be traced; names it.
        """
        traced = self._unrolled(device)
        costs = with_transfers(traced.costs, traced.events, written=streams_trained(self.config))
        return replace(traced, costs=costs, notes=(*self.notes, *traced.notes, *self.not_counted))

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What takes memory beside the trace, in a sentence each."""
        config: Any = self.config
        colocated = self.method.writes is not None and config.use_vllm and config.vllm_mode == "colocate"
        return (*self.rewards.notes, *([VLLM_NOT_COUNTED] if colocated else []))

    def traced_layers(self, layers: int, device: Device, together: int = 1) -> TracedRun:
        """A step of the model with so many layers, of which all are traced; each `together` count as one."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        trace = StorageTrace(together, KnownResults(fake))
        trace.pages_states = pages_states(optimizer_name(self.config), device)
        costs = {name: OperationCosts(layer_of=trace.layer_of) for name in ("layers", "head", "optimizer")}
        trace.watchers.append(_counting(trace, costs))
        with (
            faked(fake),
            trace,
            patch.object(offloading, "trim_heap", trace.trimmed),
            patch.dict(STORAGES, {"4bit": lambda model, _device: store_in_four_bits(model)}),
            taking(partial(_few_blocks, costs.values())),
            as_on(device, trace),
            as_stepped(optimizer_name(self.config), device),
            followed_to_the_host(trace, device),
            keys_followed(trace),
        ):
            ranks, count = self.sequence_parallel, _sending(trace, costs)
            sequence = TracedSlice(ranks=ranks, count=count) if ranks > 1 else None  # this rank among those that split
            batch, traced_scores, micro_batches = self._run(trace, fake, layers, device, sequence)
        share = batch.scores / max(traced_scores, 1)
        return TracedRun(list(trace.events), costs, batch.tokens, micro_batches, share)

    def _unrolled(self, device: Device) -> TracedRun:
        model = self.model
        layers = model.layers
        if layers // self._together <= TRACED_LAYERS:
            return self.traced_layers(layers, device)
        if self.method.head.trains_beside is None and model.layers_alike():
            for together in self._in_turn(model):
                few = self.traced_layers(TRACED_LAYERS * together, device, together)
                with contextlib.suppress(UnlikeLayers):
                    groups = layers // together
                    events = unrolled(few.events, groups)
                    _turns[self._key] = together
                    costs = {name: each.unrolled(groups) for name, each in few.costs.items()}
                    return replace(few, events=events, costs=costs)
        whose = "the adapters" if self.peft_config is not None else f"model type {self.described.model_type}"
        whose = self.method.head.trains_beside or whose
        note = f"the layers of {whose} are not alike: all {layers} were traced"
        return replace(self.traced_layers(layers, device), notes=(note,))

    def _in_turn(self, model: DescribedModel) -> Iterator[int]:
        """How many layers may count as one, the fewest first: one, as far as nobody found that these differ, or a turn
        of all kinds; after so many layers a run does the same again in any case."""
        for turn in dict.fromkeys(math.lcm(self._together, each) for each in (_turns.get(self._key, 1), model.kinds)):
            if model.layers % turn == 0 and model.layers // turn > TRACED_LAYERS:
                yield turn

    @property
    def _key(self) -> str:
        return self.described.to_json_string(use_diff=False)

    @property
    def _together(self) -> int:
        """After so many layers a run does the same again."""
        if not self.config.gradient_checkpointing:
            return 1
        return checkpointed_share(self.config.checkpointing_every).denominator

    def _run(
        self, trace: StorageTrace, fake: FakeTensorMode, layers: int, device: Device, sequence: TracedSlice | None
    ) -> tuple[RaggedBatch, int, int]:
        """Returns the heaviest micro-batch, how many of its scores were traced, and micro-batches of a step."""
        model = self.model.of_layers(layers)
        follow_layers(model, layers, trace)
        run = self._assembled(model, self.peft_config, teacher=self._made_teacher())
        weights_wait(run.model, trace)
        if run.args.gradient_checkpointing:
            inner: Any = causal_model(run.model)
            newer = getattr(inner, "activation_checkpointing_enable", None)  # older transformers have the other name
            (newer or inner.gradient_checkpointing_enable)(self.config.gradient_checkpointing_kwargs)
        with without_modes():
            rows = self._heaviest(run, run.args.per_device_train_batch_size)
            given = run.collator(rows)
            whole = run.drawn(given, epoch=0)
            step = self._rows_of_a_step(run, whole, device)
            thin = self._thinned(whole, device)
            evaluated = self._evaluated(run, device) if self.evaluates else None
        runner = run.runner(run.objective(), self._reference(run))
        for each in (runner.model, getattr(runner.reference, "model", None)):
            if each is not None:
                weights_wait(each, trace)
            if sequence is not None and each is not None:
                split_traced(each, sequence)
        rewarding = make_reward_models(self.rewards.models, trace)
        label(runner, layers, trace)
        follow_phases(runner, trace)
        trace.phase = "optimizer"
        with trace.settling():
            runner.updater.optimizer = make_optimizer(runner.model, run.args)
        evaluated = None if evaluated is None else evaluated.map(fake.from_tensor)
        rollout: TracedRollout | TracedCompletions | None = None
        if self.method.writes is not None:
            copy = None if self.config.use_vllm else self._copy_of(runner.model, layers, device)
            made = (self.method.writes, runner, self.dataset, trace, layers, rewarding, run.reader, copy)
            rollout = TracedRollout(*made)
        elif self.method.taught and run.args.writes:
            tokens = prompts_of(given)
            prompts = [TracedPrompt(*each) for each in zip(tokens, prompt_images(given, tokens), strict=True)]
            rollout = TracedCompletions(prompts, self._writers(runner, trace, layers, run.reader, device), trace)
        self._step(runner, thin.map(fake.from_tensor), evaluated, trace, layers, rollout, step)
        return whole, thin.scores, step.micro_batches

    def _rows_of_a_step(self, run: TrainingRun, heaviest: RaggedBatch, device: Device) -> StepRows:
        """As many rows of the mean length as a step has, or its heaviest micro-batch if that has more tokens."""
        rows, lengths = rows_in_a_step(run.args), run.row_lengths(self.dataset, trained=True)
        usual = 0 if lengths is None else lengths.mean() * rows / self.method.rows.together(run.args)
        held = [each for each in tree_leaves(vars(replace(heaviest, images=()))) if isinstance(each, Tensor)]
        size = sum(each.nbytes for each in held) + self._states_of_teacher(run, heaviest)
        size *= max(1.0, usual / heaviest.tokens)
        return StepRows(-(-rows // heaviest.rows), int(size), pinned=device.kind == "cuda")

    def _states_of_teacher(self, run: TrainingRun, batch: RaggedBatch) -> int:
        """The bytes of a teacher's hidden states, where it reads prompts or tokens of its own before the step."""
        own_tokens = getattr(run.args, "own_tokens", False)
        if (not own_tokens and TEACHER_IDS not in (self.dataset.column_names or ())) or not run.objective().taught:
            return 0
        weight = embedding_weight(run.model)
        width = weight.shape[1] if self.teacher is None else self.teacher.config.get_text_config().hidden_size
        return batch.scores * width * weight.element_size()

    def _writers(
        self, runner: StepRunner, trace: StorageTrace, layers: int, reader: ImageReader | None, device: Device
    ) -> list[TracedWriting]:
        """Who may write the completions of a run that distils: the student, the teacher."""
        options, found = self.config, []
        how = {"options": options, "trace": trace, "position_rule": None if reader is None else reader.position_rule}
        if options.lmbda > 0:
            copy = self._copy_of(runner.model, layers, device)
            found.append(TracedWriting(runner.model, runner.padding_free, layers=layers, copy=copy, **how))
        if options.seq_kd and options.lmbda < 1:
            reference: Any = runner.reference
            own = reference.model is runner.model
            count = layers if own else causal_model(reference.model).config.get_text_config().num_hidden_layers
            copy, how["aside"] = self._copy_of(reference.model, count, device), not own
            found.append(TracedWriting(reference.model, reference.padding_free, layers=count, copy=copy, **how))
        return found

    def _copy_of(self, model: nn.Module, layers: int, device: Device) -> GenerationCopy | None:
        """Of the weights of a model that writes; None of weights that ranks have parts of."""
        return None if self.gathers else planned_copy(self.config, model, layers, device)

    def _thinned(self, batch: RaggedBatch, device: Device) -> RaggedBatch:
        """Few enough scores for two chunks of the head in each forward, which is all that its peak depends on."""
        dtype = torch.bfloat16 if self.config.bf16 else torch.float16 if self.config.fp16 else self._dtype
        rows = self.method.head.chunk_rows(self.described, dtype, device.kind)
        most = self.config.tokens_per_microbatch
        plan = cut_rows(batch.segments, Limits(tokens=most))
        forwards = plan[0].forwards if len(plan) == 1 else 1
        return batch if rows is None else batch.thinned(2 * rows * self.sequence_parallel * forwards)

    @property
    def has_16_bits(self) -> bool:
        """Whether products are of numbers of 16 bits."""
        stored = self._dtype.itemsize == 2 or optimizer_name(self.config) in IN_BFLOAT16
        return bool(stored or self.config.bf16 or self.config.fp16)

    @property
    def _dtype(self) -> torch.dtype:
        """Of the weights."""
        name = model_init(self.config.model_init_kwargs).get("dtype", "float32")
        if name == "auto":
            name = getattr(self.described, "dtype", None) or "float32"
        return getattr(torch, str(name).removeprefix("torch."))

    def _made_teacher(self) -> nn.Module | dict[str, nn.Module] | None:
        """On tensors without memory; several by name."""
        return None if self.teacher is None else self.teacher.made(self._dtype)

    def _assembled(
        self, model: nn.Module, peft_config: Any, *, adapts: bool = True, teacher: Any = None
    ) -> TrainingRun:
        args = copy.deepcopy(self.config)
        args.model_init_kwargs = None  # the model is there
        if self.method.taught:
            args.teacher_model_name_or_path = None  # and so is the teacher
        inputs = Inputs(
            model,
            self.processing_class,
            copy.deepcopy(peft_config),  # PEFT writes into it what it finds in this model
            ref_model=teacher,
            needs_tokenizer=not self.prepared,
            adapters_trained=self.adapters_trained,
            adapts=adapts,
        )
        run = TrainingRun(self.method, args, inputs)
        with without_modes():
            if not self.prepared:
                self._prepare(lambda: run.prepared(self.dataset, "train")[0])
        with contextlib.nullcontext() if peft_config is None else without_bitsandbytes():
            run.install()
        with without_modes():
            run.check_rows("train", self.dataset)
        return run

    def _reference(self, run: TrainingRun) -> Any:
        """The reference, of whose log-probabilities nothing is left where they are computed before training."""
        if self.precomputed:
            return lambda batch: torch.zeros(batch.scores)
        return run.make_reference()

    def _prepare(self, prepare: Callable[[], Any]) -> None:
        """The rows, or a sample of them. Where a sample lost many to limits on length, the longest that are within them
        may not be in it, and all are prepared."""
        most = max(SAMPLE, *(8 * rows for rows in (rows_in_a_step(self.config), self.config.eval_batch_size)))
        self.prepared = True
        if self.samples:
            with contextlib.suppress(ValueError), sampling(most) as sample:
                found = prepare()
                if sample.taken - len(found) <= sample.taken // 4:
                    self.dataset, self.notes = found, (str(sample),) if sample.taken else ()
                    return
        self.dataset = prepare()

    def _heaviest(self, run: TrainingRun, most: int) -> list[dict]:
        lengths = run.row_lengths(self.dataset, trained=True)
        if lengths is None:
            raise ValueError("the lengths of the rows are not known beforehand: give a dataset that is no stream")
        most = -(-most // self.method.rows.together(run.args))
        chosen = heaviest_batch(lengths, most, run.args.tokens_per_microbatch)
        return [self.dataset[row] for row in chosen]

    def _step(
        self,
        runner: StepRunner,
        batch: RaggedBatch,
        evaluated: RaggedBatch | None,
        trace: StorageTrace,
        layers: int,
        rollout: TracedRollout | TracedCompletions | None,
        step: StepRows,
    ) -> None:
        """The parts that a run on the CPU and on a GPU is put together from."""
        model, several = runner.model.train(), step.micro_batches > 1

        def part(name: str) -> None:
            weights_go(filter(None, (model, getattr(runner.reference, "model", None))))
            trace.part(name)

        if self.gathers or self._is_large(model, layers):
            host_heap.trim_in_layers(model, trace.trimmed)
        runner.begin()
        label(runner, layers, trace)
        if rollout is not None:
            part("rollout")
            batch = rollout.run(batch)
            label(runner, layers, trace)
        part("room")
        reserved = self._reserved(model, trace) if wants_room(runner.updater.inner) else []
        part("gradients")
        with step.copied(trace):
            # Of several micro-batches, the gradients wait for the last, and nothing is stepped in backward.
            gradients = runner.accumulate if several else runner.gradients
            if several:
                gradients(batch)  # those of the micro-batches before, made between their activations
                label(runner, layers, trace)
            in_backward = runner.in_backward is not None and not several
            if in_backward:
                part("states")
                gradients(batch)
                _take_step(runner, layers, trace)
            part("step")
            gradients(batch)
            trace.phase = "optimizer"
            label(runner, layers, trace)
            for name in () if in_backward else ("states", "optimizer"):
                part(name)
                _take_step(runner, layers, trace)
            if in_backward:
                _take_step(runner, layers, trace)
            part("clear")
            runner.updater.zero_grad(model)
        if evaluated is not None:
            part("evaluation")
            with trace.during("evaluation"):
                runner.evaluate(evaluated, Totals(), model.eval())
                model.train()
        if self.saves:
            part("saving")
            self._save(runner, trace)
        part("end")
        del reserved

    def _evaluated(self, run: TrainingRun, device: Device) -> RaggedBatch:
        """As heavy a batch to evaluate as the rows of training make."""
        rows = self._heaviest(run, run.args.per_device_eval_batch_size)
        return self._thinned(run.drawn(run.collator(rows), EVALUATION), device)

    def _save(self, runner: StepRunner, trace: StorageTrace) -> None:
        """What is written, gathered; writing it copies nothing (safetensors and torch write from where a tensor is)."""
        with trace.during("saving"):
            torch.empty(0)  # nothing may be made, and it is a phase all the same
            _ = runner.model.state_dict(), runner.updater.optimizer.state_dict()

    def _reserved(self, model: nn.Module, trace: StorageTrace) -> list[Tensor]:
        """What a rehearsal holds in the place of the optimizer's states."""
        reserved = []
        with trace.owned_by("optimizer"):
            for parameter, sizes in () if trace.pages_states else states_of(model, optimizer_name(self.config)):
                pieces = [torch.empty(size, dtype=torch.uint8) for size in sizes]
                trace.belongs(pieces, None, trace.layer_of(parameter))
                reserved += pieces
        return reserved

    def _is_large(self, model: nn.Module, layers: int) -> bool:
        wanted = self.described.get_text_config().num_hidden_layers
        stack = stack_of(model, layers)
        inside = sum(p.numel() * p.element_size() for p in stack.parameters()) if stack is not None else 0
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        return whole + inside * (wanted - layers) / layers >= host_heap.LARGE


def _take_step(runner: StepRunner, layers: int, trace: StorageTrace) -> None:
    optimizer = runner.updater.inner
    with trace.stepping(optimizer):
        runner.updater.optimizer.step()
    label(runner, layers, trace, optimizer)


def _counting(trace: StorageTrace, costs: Mapping[str, OperationCosts]) -> Callable[[Any, Any, Any], None]:
    """Counts the operations of a micro-batch, of its head and of the optimizer, each as it is traced once."""
    parts = {"step": ("layers", "head"), "optimizer": ("optimizer", "optimizer")}

    def count(func: Any, args: Any, out: Any) -> None:
        names = parts.get(trace.now)
        if names is not None:
            headed = trace.layer is None and trace.phase in ("head", "backward")
            each = costs[names[headed]]
            each.layer = trace.layer
            each(func, args, out)

    return count


def _few_blocks(costs: Collection[OperationCosts], blocks: Sequence[B]) -> Iterator[B]:
    """Of the blocks of an optimizer's step, or of the head's rows, the first, the second for all that are like it, and
    the last, which may be smaller."""
    if len(blocks) <= 3:
        yield from blocks
        return
    yield blocks[0]
    for each in costs:
        each.times = len(blocks) - 2
    yield blocks[1]
    for each in costs:
        each.times = 1
    yield blocks[-1]


def _sending(trace: StorageTrace, costs: Mapping[str, OperationCosts]) -> Callable[[int], None]:
    """Counts bytes that a rank sends in a micro-batch, in the layer that runs."""

    def count(size: int) -> None:
        if trace.now == "step":
            costs["layers"].layer = trace.layer
            costs["layers"].sends(size)

    return count
