"""Foretells the peak of a run before any weight is loaded: the trainer's own step, on tensors without memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

import lowtide
from lowtide.engine.forward import causal_model
from lowtide.engine.head import body
from lowtide.memory.measure import bytes_text, resident_bytes
from lowtide.planner.trace import PHASES, StorageTrace
from lowtide.ragged import RaggedBatch
from lowtide.trainers.config import TrainingConfig
from lowtide.trainers.method import MethodTrainer
from lowtide.trainers.rehearsal import heaviest_rows, rows_in_a_step

TRACED_LAYERS = (2, 3)
"""Layers are alike, so two small models give the rest."""


@dataclass(frozen=True)
class Estimate:
    """What a run will take, in bytes."""

    peak_bytes: int
    phase: str
    """In which the peak falls."""
    phases: Mapping[str, Mapping[str, int]]
    """For each phase, the bytes by category when it holds most."""
    runtime_bytes: int
    """What the process holds beside tensors: on a CPU the imports, on CUDA nothing that the allocator counts."""
    device: str

    @property
    def tensor_bytes(self) -> int:
        """The most that tensors hold."""
        return self.peak_bytes - self.runtime_bytes

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.phases[self.phase].items() if size)
        runtime = f", runtime {bytes_text(self.runtime_bytes)}" if self.runtime_bytes else ""
        return f"peak {bytes_text(self.peak_bytes)} on {self.device}, in {self.phase}: {parts}{runtime}"


def estimate(
    config: TrainingConfig,
    model: str | PretrainedConfig,
    *,
    lengths: Sequence[int | Sequence[int]],
    peft_config: Any = None,
) -> Estimate:
    """The peak of a run on a CPU; no weight is made.

    Args:
        config: of the trainer, as the run will have it.
        model: its config, or a path or hub name of it.
        lengths: the tokens of each row: a number for `SFTConfig`; for pairs (prompt, chosen, rejected), for single
            completions (prompt, completion).
        peft_config: adapters to put on the model.

    Raises:
        ValueError: the config is of no method, or the lengths do not fit it.
    """
    described = AutoConfig.from_pretrained(model) if isinstance(model, str) else model
    rows = prepared_rows(config, lengths)
    layers = described.get_text_config().num_hidden_layers
    few, more = TRACED_LAYERS
    if layers <= more:
        phases = _trace(config, described, layers, rows, peft_config)
    else:
        small, large = (_trace(config, described, count, rows, peft_config) for count in TRACED_LAYERS)
        phases = {
            phase: {
                name: small[phase].get(name, 0)
                + (large[phase].get(name, 0) - small[phase].get(name, 0)) * (layers - few) // (more - few)
                for name in {*small[phase], *large[phase]}
            }
            for phase in PHASES
            if phase in small and phase in large
        }
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    runtime = resident_bytes()
    return Estimate(sum(phases[phase].values()) + runtime, phase, phases, runtime, "cpu")


def _trace(
    config: TrainingConfig, described: PretrainedConfig, layers: int, rows: Sequence[dict], peft_config: Any
) -> dict[str, dict[str, int]]:
    """Bytes by category at the peak of each phase, of a model with so many layers."""
    trace = StorageTrace()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, trace:
        model = _fake_model(config, described, layers)
        args = copy.copy(config)
        args.rehearsal = False
        trainer = trainer_on(model, args, rows, peft_config)
        if args.gradient_checkpointing:
            inner = causal_model(trainer.model)
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        trace.belongs((*trainer.model.parameters(), *trainer.model.buffers()), "weights")
        with unset_fake_temporarily():
            batch = _thinned(cast(RaggedBatch, trainer.data_collator(list(rows))), described)
        batch = batch.map(fake.from_tensor)
        _phases(trainer, trace)
        _two_steps(trainer, batch, trace, len(rows) < rows_in_a_step(trainer))
    return {phase: dict(peak) for phase, peak in trace.peaks.items()}


def _fake_model(config: TrainingConfig, described: PretrainedConfig, layers: int) -> nn.Module:
    described = copy.deepcopy(described)
    text = described.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    dtype = getattr(
        torch, str(dict(cast(dict, config.model_init_kwargs) or {}).get("dtype", "float32")).removeprefix("torch.")
    )
    kind = AutoModelForCausalLM
    if _trainer_of(config).rewards:
        kind, described.num_labels = AutoModelForSequenceClassification, 1
    model = kind.from_config(described, dtype=dtype)
    model.to = lambda *args, **kwargs: model  # there is nothing to move
    return model


def trainer_on(model: nn.Module, config: TrainingConfig, rows: Sequence[dict], peft_config: Any) -> MethodTrainer:
    """The config's trainer on prepared rows; it wants no tokenizer."""
    trainer_class = _trainer_of(config)

    class OnPreparedRows(trainer_class):  # type: ignore[valid-type, misc]
        needs_tokenizer = False

        def prepare(self, dataset: Any, name: str) -> Any:
            return dataset, None

    return OnPreparedRows(model, args=config, train_dataset=Dataset.from_list(list(rows)), peft_config=peft_config)


def _trainer_of(config: TrainingConfig) -> type[MethodTrainer]:
    name = type(config).__name__.removesuffix("Config") + "Trainer"
    found = getattr(lowtide, name, None)
    if found is None:
        raise ValueError(f"{type(config).__name__} is of no trainer: give the config of a method, SFTConfig say")
    return found


def _phases(trainer: MethodTrainer, trace: StorageTrace) -> None:
    """Lets the trace know where in the step it is."""
    inner = causal_model(trainer.model)
    around, backward = trainer._around, trainer.accelerator.backward

    @contextlib.contextmanager
    def forward() -> Iterator[None]:
        with trace.during("forward"), around():
            yield

    def at_the_head(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        trace.phase = "head"

    def in_backward(loss: torch.Tensor, **kwargs: Any) -> None:
        with trace.during("backward"):
            backward(loss, **kwargs)

    trainer._around = forward
    trainer.accelerator.backward = in_backward
    body(inner).register_forward_hook(at_the_head)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_told(trace))


def _told(trace: StorageTrace) -> Callable[[Any], None]:
    """A hook that says what a gradient is; where it was added in place there is none to hand on."""
    return lambda gradient: None if gradient is None else trace.belongs([gradient], "gradients")


def _two_steps(trainer: MethodTrainer, batch: RaggedBatch, trace: StorageTrace, several: bool) -> None:
    """The second step finds the optimizer's states, and where a step has several micro-batches its gradients."""
    trace.phase = "optimizer"
    model = trainer.model.train()
    trainer.create_optimizer()
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    trainer._before_first_step(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if trainer._in_backward is None:
        with trace.owned_by("gradients"):
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        trainer.optimizer.step()
        if not several:
            model.zero_grad()
    else:
        trainer._gradients(model, batch)
    trainer._gradients(model, batch)


def _thinned(batch: RaggedBatch, described: PretrainedConfig) -> RaggedBatch:
    """Few enough scores for two chunks of the head, which is all that its peak depends on."""
    return batch.thinned(2 * max(16, (32 << 20) // (4 * described.get_text_config().vocab_size)))


def prepared_rows(config: TrainingConfig, lengths: Sequence[int | Sequence[int]]) -> list[dict]:
    """Prepared rows of such lengths, the heaviest that one micro-batch takes."""
    columns = {
        1: ("input_ids",),
        2: ("prompt_ids", "completion_ids"),
        3: ("prompt_ids", "chosen_ids", "rejected_ids"),
    }
    each = [(length,) if isinstance(length, int) else tuple(length) for length in lengths]
    most = config.per_device_train_batch_size
    *_, chosen = heaviest_rows(np.array([sum(row) for row in each]), most, config.tokens_per_microbatch)
    made = []
    for number in chosen:
        row = {name: [1] * length for name, length in zip(columns[len(each[number])], each[number], strict=True)}
        if "input_ids" in row:
            row["labels"] = row["input_ids"]
        if "completion_ids" in row:
            row |= {"kl_completion_ids": row["completion_ids"], "label": True}
        made.append(row)
    return made
