"""One optimizer step of a trainer on tensors without memory, and everything that its storages did.

Nothing is foretold here by formula: the trainer is built as ever, adapters, techniques and reference included, on a
model whose weights are fake, and its own step runs, after the states of the step before have been made.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from lowtide.engine.forward import causal_model
from lowtide.engine.head import body
from lowtide.memory import host_heap, offloading
from lowtide.memory.narrow_step import unwrap_optimizer
from lowtide.metrics import Totals
from lowtide.planner.devices import Device
from lowtide.planner.heaviest import heaviest_rows, row_lengths
from lowtide.planner.layout import Layout
from lowtide.planner.speed import OperationCosts
from lowtide.planner.stand_ins import as_on
from lowtide.planner.states import state_sizes
from lowtide.planner.trace import PHASES, Event, StorageTrace
from lowtide.planner.unroll import TRACED_LAYERS, UnlikeLayers, unrolled
from lowtide.ragged import RaggedBatch
from lowtide.step import evaluate_batch

HEAD_CHUNK = 32 << 20
"""Bytes of logits from which the head works in chunks."""


@dataclass(frozen=True)
class Traced:
    """What was seen of a run, with all its layers."""

    events: Sequence[Event]
    """In parts: "loading", "room", "gradients", "step", "states", "optimizer", "clear", "evaluation", "end"."""
    costs: Mapping[str, OperationCosts]
    """Of a micro-batch, of its head, of an optimizer step."""
    tokens: int
    """Of a micro-batch."""
    micro_batches: int
    """In an optimizer step."""
    notes: tuple[str, ...] = ()

    def tokens_per_second(self, device: Device, exchanged_bytes: float = 0.0) -> float:
        """On one device, by a roofline over the operations."""
        micro_batch = self.costs["layers"].seconds(device) + self.head_share * self.costs["head"].seconds(device)
        step = self.costs["optimizer"].seconds(device)
        exchange = exchanged_bytes / device.rates.interconnect if exchanged_bytes else 0.0
        return self.tokens * self.micro_batches / (micro_batch * self.micro_batches + step + exchange)

    head_share: float = 1.0
    """How many times the scores that were traced there are."""


class FakeRun:
    """A trainer's run, in which tensors have no memory.

    Args:
        trainer_class: of the method; one of `lowtide.trainers`.
        config: its options.
        described: the model's config.
        dataset: rows as the trainer takes them.
        processing_class: their tokenizer; by default the model's own.
        peft_config: adapters to put on the model.
        prepared: whether the rows are token rows already.
    """

    def __init__(
        self,
        trainer_class: Any,
        config: Any,
        described: PretrainedConfig,
        dataset: Dataset,
        *,
        processing_class: Any = None,
        peft_config: Any = None,
        prepared: bool = False,
    ) -> None:
        self.trainer_class, self.described, self.dataset = trainer_class, described, dataset
        self.processing_class, self.peft_config, self.prepared = processing_class, peft_config, prepared
        self.given, self.rehearsal = config, bool(config.rehearsal)
        self.evaluates = str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no"
        self.precomputed = getattr(config, "precompute_ref_log_probs", False)
        self.config = copy.copy(config)
        self.config.rehearsal, self.config.eval_strategy, self.config.do_eval = False, "no", False
        if self.precomputed:
            self.config.precompute_ref_log_probs = False

    def of(self, described: PretrainedConfig) -> FakeRun:
        """The same run of another model."""
        other = copy.copy(self)
        other.described = described
        return other

    def trainer(self) -> Any:
        """The trainer with its rows prepared, of one layer."""
        with _faked():
            return self._trainer(self._model(1))

    def layout(self) -> Layout:
        """The parameters of the whole model."""
        with torch.device("meta"):
            model = self._model(self.described.get_text_config().num_hidden_layers)
        return Layout.of(model, str(getattr(self.config.optim, "value", self.config.optim)))

    def traced(self, device: Device) -> Traced:
        """Loading, and a step on the heaviest micro-batch of the data, as they would be on a device.

        Raises:
            ValueError: an operation cannot be traced; names it.
        """
        layers = self.described.get_text_config().num_hidden_layers
        if layers <= TRACED_LAYERS:
            return self._traced(layers, device)
        few = self._traced(TRACED_LAYERS, device)
        try:
            events = unrolled(few.events, layers)
        except UnlikeLayers:
            note = f"the layers of model type {self.described.model_type} are not alike: all {layers} were traced"
            return replace(self._traced(layers, device), notes=(note,))
        return replace(few, events=events, costs={name: each.unrolled(layers) for name, each in few.costs.items()})

    def _traced(self, layers: int, device: Device) -> Traced:
        trace = StorageTrace()
        costs = {name: OperationCosts(layer_of=trace.layer_of) for name in ("layers", "head", "optimizer")}
        trace.watchers.append(_counting(trace, costs))
        with _faked() as fake, trace, patch.object(offloading, "trim_heap", trace.trimmed), as_on(device):
            batch, traced_scores, micro_batches = self._run(trace, fake, layers)
        share = batch.scores / max(traced_scores, 1)
        return Traced(list(trace.events), costs, batch.tokens, micro_batches, head_share=share)

    def _run(self, trace: StorageTrace, fake: FakeTensorMode, layers: int) -> tuple[RaggedBatch, int, int]:
        """Returns the heaviest micro-batch, how many of its scores were traced, and micro-batches of a step."""
        model = self._model(layers)
        _follow_layers(model, layers, trace)
        trainer = self._trainer(model)
        trainer.accelerator.prepare_model(trainer.model, device_placement=False)  # autocast is of the wrapper
        if self.config.gradient_checkpointing:
            inner: Any = causal_model(trainer.model)
            newer = getattr(inner, "activation_checkpointing_enable", None)  # older transformers have the other name
            (newer or inner.gradient_checkpointing_enable)(self.config.gradient_checkpointing_kwargs)
        with _disable_current_modes():
            rows = self._heaviest(trainer, trainer.args.per_device_train_batch_size)
            whole = cast(RaggedBatch, trainer.data_collator(rows))
            thin = self._thinned(whole)
        _label(trainer, layers, trace)
        self._follow_phases(trainer, trace)
        micro_batches = -(-_rows_in_a_step(trainer) // len(rows))
        self._step(trainer, thin.map(fake.from_tensor), trace, fake, layers, several=micro_batches > 1)
        return whole, thin.scores, micro_batches

    def _thinned(self, batch: RaggedBatch) -> RaggedBatch:
        """Few enough scores for two chunks of the head, which is all that its peak depends on."""
        return batch.thinned(2 * max(16, HEAD_CHUNK // (4 * self.described.get_text_config().vocab_size)))

    def _model(self, layers: int) -> nn.Module:
        described = copy.deepcopy(self.described)
        text = described.get_text_config()
        text.num_hidden_layers = layers
        for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
            if isinstance(getattr(text, name, None), list):
                setattr(text, name, getattr(text, name)[:layers])
        kind: Any = AutoModelForCausalLM
        if self.trainer_class.rewards:
            kind, described.num_labels = AutoModelForSequenceClassification, 1
        dtype = str(dict(self.config.model_init_kwargs or {}).get("dtype", "float32")).removeprefix("torch.")
        return kind.from_config(described, dtype=getattr(torch, dtype))

    def _trainer(self, model: nn.Module) -> Any:
        run = self

        class Faked(self.trainer_class):
            needs_tokenizer = not run.prepared

            def prepare(self, dataset: Any, name: str) -> Any:
                if run.prepared:
                    return dataset, None
                with _disable_current_modes():
                    return super().prepare(dataset, name)

            def make_reference(self, model: nn.Module, engine: Any) -> Any:
                if run.precomputed:
                    return lambda batch: torch.zeros(batch.scores)
                return super().make_reference(model, engine)

        args = copy.copy(self.config)
        args.model_init_kwargs = None  # the model is there
        return Faked(
            model,
            args=args,
            train_dataset=self.dataset,
            processing_class=self.processing_class,
            peft_config=self.peft_config,
        )

    def _heaviest(self, trainer: Any, most: int) -> list[dict]:
        dataset = trainer.train_dataset
        lengths = row_lengths(dataset)
        if lengths is None:
            raise ValueError("the lengths of the rows are not known beforehand: give a dataset that is no stream")
        *_, chosen = heaviest_rows(lengths, most, trainer.args.tokens_per_microbatch)
        return [dataset[row] for row in chosen]

    def _follow_phases(self, trainer: Any, trace: StorageTrace) -> None:
        """Lets the trace know where in the step it is, and what gradients are."""

        def entered(_ended: str, begins: str) -> None:
            if trace.phase != "evaluation" and begins in PHASES:
                trace.phase = begins
            trace.layer = None

        trainer.phases.listeners.append(entered)
        trainer.phases.split_forward(body(causal_model(trainer.model)))
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_told(trace))

    def _step(
        self,
        trainer: Any,
        batch: RaggedBatch,
        trace: StorageTrace,
        fake: FakeTensorMode,
        layers: int,
        *,
        several: bool,
    ) -> None:
        """The parts that a run on the CPU and on a GPU is put together from."""
        model = trainer.model.train()
        trace.phase = "optimizer"
        trainer.create_optimizer()
        trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
        if self._is_large(trainer.model, layers):
            host_heap._trim_in_layers(model, trace.trimmed)
        trainer._before_first_step(model)
        _label(trainer, layers, trace)
        trained = [p for p in model.parameters() if p.requires_grad]
        trace.part("room")
        room = [] if unwrap_optimizer(trainer.optimizer).state else self._room(trained, trace)
        trace.part("gradients")
        if trainer._in_backward is None and several:
            with trace.owned_by("gradients"):
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
            _label(trainer, layers, trace)
        if trainer._in_backward is not None:
            trace.part("states")
            trainer._gradients(model, batch)
            trainer.optimizer.step()
            _label(trainer, layers, trace, unwrap_optimizer(trainer.optimizer))
        trace.part("step")
        trainer._gradients(model, batch)
        trace.phase = "optimizer"
        _label(trainer, layers, trace)
        if trainer._in_backward is None:
            trace.part("states")
        trainer.optimizer.step()
        _label(trainer, layers, trace, unwrap_optimizer(trainer.optimizer))
        if trainer._in_backward is None:
            trace.part("optimizer")
            trainer.optimizer.step()
        trace.part("clear")
        model.zero_grad()
        if self.evaluates:
            trace.part("evaluation")
            self._evaluate(trainer, trace, fake)
        trace.part("end")
        del room

    def _evaluate(self, trainer: Any, trace: StorageTrace, fake: FakeTensorMode) -> None:
        """As heavy a batch as the rows of training make."""
        with _disable_current_modes():
            rows = self._heaviest(trainer, trainer.args.per_device_eval_batch_size)
            thin = self._thinned(cast(RaggedBatch, trainer.data_collator(rows)))
        batch = thin.map(fake.from_tensor)
        with trace.during("evaluation"):
            models = trainer.models(trainer.model.eval())
            evaluate_batch(models, batch, trainer.objective, Totals(), limits=trainer._eval_limits)
            trainer.model.train()

    def _room(self, trained: Sequence[Tensor], trace: StorageTrace) -> list[Tensor]:
        """What a rehearsal holds in the place of the optimizer's states."""
        optimizer, room = str(getattr(self.config.optim, "value", self.config.optim)), []
        with trace.owned_by("optimizer"):
            for parameter in trained:
                pieces = [torch.empty(size, dtype=torch.uint8) for size in state_sizes(parameter, optimizer)]
                trace.belongs(pieces, None, trace.layer_of(parameter))
                room += pieces
        return room

    def _is_large(self, model: nn.Module, layers: int) -> bool:
        wanted = self.described.get_text_config().num_hidden_layers
        stack = _stack(model, layers)
        inside = sum(p.numel() * p.element_size() for p in stack.parameters()) if stack is not None else 0
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        return whole + inside * (wanted - layers) / layers >= host_heap.LARGE


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


UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
"""How an operation says that it has no shape without values."""


@contextlib.contextmanager
def _state_of_accelerate_kept() -> Iterator[None]:
    """Traced trainers are of the CPU, and accelerate remembers one device for the whole process: that of the last."""
    kinds = (PartialState, AcceleratorState, GradientState)
    before = [dict(kind._shared_state) for kind in kinds]
    try:
        yield
    finally:
        for kind, state in zip(kinds, before, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)


@contextlib.contextmanager
def _faked() -> Iterator[FakeTensorMode]:
    """Tensors have no values: models stay where they are, and copies touch no memory.

    Raises:
        ValueError: an operation has no form without values; with its name.
    """
    try:
        with (
            _state_of_accelerate_kept(),
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
            patch.object(nn.Module, "to", _stay),
            patch.object(FakeTensor, "__deepcopy__", _copied, create=True),
        ):
            yield fake
    except UNTRACEABLE as error:
        operation = getattr(error, "func", None) or (error.args[0] if error.args else type(error).__name__)
        raise ValueError(
            f"the run cannot be traced without values: {str(operation).splitlines()[0]}. Memory of such a model is "
            "not foretold; measure it with a short run (--max_steps 2 --memory_report report.json)"
        ) from error


def _copied(tensor: FakeTensor, memo: dict) -> Tensor:
    """A copy of a tensor without memory. torch's own asks for its address, copies what it takes to be there, and so
    writes into memory that is another's: a second trace with a copied reference crashed."""
    clone = tensor.detach().clone()
    memo[id(tensor)] = nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone
    return memo[id(tensor)]


def _stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """There is nothing to move."""
    return module


def _rows_in_a_step(trainer: Any) -> int:
    return trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps


def _told(trace: StorageTrace) -> Callable[[Any], None]:
    """A hook that says what a gradient is; where it was added in place there is none to hand on."""
    return lambda gradient: None if gradient is None else trace.belongs([gradient], "gradients")


def _stack(model: nn.Module, layers: int) -> nn.ModuleList | None:
    """The list of a model's layers."""
    return next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers), None)


def _follow_layers(model: nn.Module, layers: int, trace: StorageTrace) -> None:
    """Lets the trace know which layer runs, forward and backward; copies of the model do the same."""

    def begins(number: int) -> Callable[..., None]:
        def hook(_layer: nn.Module, inputs: tuple) -> None:
            if trace.phase == "backward":
                return
            trace.layer = number
            if number == 0 and inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
                inputs[0].register_hook(back_in(None))

        return hook

    def ends(number: int) -> Callable[..., None]:
        def hook(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            if trace.phase == "backward":
                return
            first = output[0] if isinstance(output, tuple) else output
            if first.requires_grad:
                first.register_hook(back_in(number))
            if number == layers - 1:
                trace.layer = None

        return hook

    def back_in(number: int | None) -> Callable[[Any], None]:
        def hook(_gradient: Any) -> None:
            trace.layer = number

        return hook

    for number, layer in enumerate(_stack(model, layers) or ()):
        layer.register_forward_pre_hook(begins(number))
        layer.register_forward_hook(ends(number))


def _label(trainer: Any, layers: int, trace: StorageTrace, optimizer: Any = None) -> None:
    """What weights, gradients and states are and of which layer, those of the model and of a reference."""
    model, reference = trainer.model, getattr(trainer.reference, "model", None)

    def states_of(parameter: Tensor) -> list[Tensor]:
        states = {} if optimizer is None else optimizer.state.get(parameter, {})
        return [state for state in states.values() if isinstance(state, Tensor)]

    policy = set(model.parameters())
    trace.belongs((*policy, *model.buffers()), "weights")
    trace.belongs([tensor.grad for tensor in policy if tensor.grad is not None], "gradients")
    trace.belongs([state for tensor in policy for state in states_of(tensor)], "optimizer")
    if reference is not None:
        theirs = [tensor for tensor in (*reference.parameters(), *reference.buffers()) if tensor not in policy]
        trace.belongs(theirs, "reference")
    for stack in filter(None, (_stack(each, layers) for each in (model, reference) if each is not None)):
        for number, layer in enumerate(stack):
            for tensor in (*layer.parameters(), *layer.buffers()):
                gradient = [] if tensor.grad is None else [tensor.grad]
                trace.belongs([tensor, *gradient, *states_of(tensor)], None, number)
