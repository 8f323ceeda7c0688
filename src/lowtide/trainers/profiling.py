"""Records the memory of a trainer's own steps: which recorder a device has, and what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from lowtide.data.batches.heaviest import heaviest_rows
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.planner.profiling.cuda_history import CudaHistory
from lowtide.planner.profiling.live_storages import LiveStorages
from lowtide.planner.profiling.recording import Recording
from lowtide.planner.tracing.trace import REWARD
from lowtide.step.phases import BETWEEN
from lowtide.trainers.method import MethodTrainer

Recorder = CudaHistory | LiveStorages


def record(trainer: MethodTrainer) -> Recording:
    """Trains, and returns what lived meanwhile."""
    device = trainer.args.device
    recorder = CudaHistory(device) if device.type == "cuda" else LiveStorages()
    model: Any = trainer.model
    reference, hooks = trainer.reference, []

    def enter(ended: str, begins: str) -> None:
        if BETWEEN in (ended, begins) and "rehearsal" in (ended, begins):  # it comes before the first step
            recorder.step = 0 if begins == "rehearsal" else trainer.state.global_step + 1
        for category, name, tensor in _belongings(trainer, reference):
            recorder.belongs([(name, tensor)], category)
        recorder.enter(ended, begins)

    def of_the_reference(batch: Any) -> Tensor:
        assert reference is not None
        with recorder.owned_by("reference"):
            return reference(batch)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(_gradient(recorder, name)))
    trainer.phases.listeners.append(enter)
    trainer.add_callback(_Steps(recorder))
    trainer.reference = None if reference is None else of_the_reference
    try:
        with recorder:
            enter("", BETWEEN)
            trainer.train()
            return recorder.finished()
    finally:
        for hook in hooks:
            hook.remove()
        trainer.phases.listeners.remove(enter)
        trainer.remove_callback(_Steps)
        trainer.reference = reference


def _belongings(trainer: Any, reference: Any) -> Iterator[tuple[str, str, Tensor]]:
    """(category, name, tensor) of what stays."""
    model = trainer.model
    for name, parameter in model.named_parameters():
        yield "weights", name, parameter
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad
    for name, buffer in model.named_buffers():
        yield "weights", name, buffer
    optimizer = trainer.optimizer
    if optimizer is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in unwrap_optimizer(optimizer).state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield "optimizer", f"{name} of {names.get(parameter, 'a weight')}", value
    frozen = getattr(reference, "model", None)
    if frozen is not None and frozen is not model:
        for name, tensor in (*frozen.named_parameters(), *frozen.named_buffers()):
            yield "reference", name, tensor
    models: Any = getattr(trainer, "reward_models", ())
    for number, rewards in enumerate(models):
        for name, tensor in (*rewards.named_parameters(), *rewards.named_buffers()):
            yield REWARD, f"{name} of reward model {number}", tensor


def _gradient(recorder: Recorder, name: str) -> Any:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            recorder.belongs([(name, parameter.grad)], "gradients")

    return hook


class _Steps(TrainerCallback):
    """Tells the recorder which step it is."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.step = state.global_step + 1


def heaviest_micro_batch(trainer: MethodTrainer) -> tuple[int, ...]:
    """The tokens of each row of the heaviest micro-batch; none where that is not known beforehand."""
    lengths, limits = trainer.row_lengths(), trainer.limits
    if lengths is None or limits.rows is None:
        return ()
    *_, rows = heaviest_rows(lengths, -(-limits.rows // trainer.rows_together), limits.tokens)
    return tuple(int(lengths[row]) for row in rows)
