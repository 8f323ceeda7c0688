"""Tells a trace which layer runs, which phase it is in, and what each tensor is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import body
from lowtide.engine.reference import ReferenceModel
from lowtide.engine.vision import TOWERS
from lowtide.memory.activations import chain_storage
from lowtide.memory.optimizers.file_states import FileStates
from lowtide.ops.attention.piece_keys import OnDevice
from lowtide.planner.tracing.substitutes.package_optimizers import PAGED_FROM
from lowtide.planner.tracing.trace import HOST, IN_FILES, KEYS, PHASES, PINNED, StorageTrace
from lowtide.step.runner import StepRunner


def follow_phases(runner: StepRunner, trace: StorageTrace) -> None:
    """Lets a trace know where in the step it is, and what gradients are."""

    def entered(_ended: str, begins: str) -> None:
        if trace.phase != "evaluation" and begins in PHASES:
            trace.phase = begins
        trace.layer = None

    runner.phases.listeners.append(entered)
    runner.phases.split_forward(body(causal_model(runner.model)))
    for model in (runner.model, *getattr(runner.reference, "models", ())):
        _follow_reference(body(causal_model(model)), trace)
    # Gradients that are added in place pass no hook, and would not be added in place if there were one.
    inner: Any = causal_model(runner.model)
    ends = [each for each in (inner.get_input_embeddings(), inner.get_output_embeddings()) if each is not None]
    unheard = {parameter for module in ends for parameter in module.parameters()}
    for parameter in runner.model.parameters():
        if parameter.requires_grad and parameter not in unheard:
            parameter.register_hook(_told(trace))


def _follow_reference(part: nn.Module, trace: StorageTrace) -> None:
    """A body that runs between the phases of a step, as a reference's does, is in forward, and then in the head."""
    runs: list[bool] = []

    def begins(_body: nn.Module, _inputs: Any) -> None:
        runs.append(trace.phase in ("backward", "optimizer"))
        if runs[-1]:
            trace.phase, trace.layer = "forward", None

    def ends(_body: nn.Module, _inputs: Any, _output: Any) -> None:
        if runs.pop():
            trace.phase, trace.layer = "head", None

    part.register_forward_pre_hook(begins)
    part.register_forward_hook(ends)


def _told(trace: StorageTrace) -> Callable[[Any], None]:
    """A hook that says what a gradient is; a part of it may be none."""
    return lambda gradient: None if gradient is None else trace.belongs([gradient], "gradients")


def stack_of(model: nn.Module, layers: int) -> nn.ModuleList | None:
    """The list of a model's layers, those of a vision tower left aside."""
    towers = {
        id(part) for name, tower in model.named_modules() if name.split(".")[-1] in TOWERS for part in tower.modules()
    }
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and id(m) not in towers)
    return next((m for m in lists if len(m) == layers), None)


def follow_layers(model: nn.Module, layers: int, trace: StorageTrace) -> None:
    """Lets the trace know which layer runs, forward and backward; copies of the model do the same."""

    def begins(number: int) -> Callable[..., None]:
        def hook(_layer: nn.Module, inputs: tuple) -> None:
            if trace.phase == "backward":
                return
            trace.layer = trace.place(number)
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
            trace.layer = None if number is None else trace.place(number)

        return hook

    for number, layer in enumerate(stack_of(model, layers) or ()):
        layer.register_forward_pre_hook(begins(number))
        layer.register_forward_hook(ends(number))


class _Kept(OnDevice):
    """What the pieces of long rows keep on the device, which a trace is told of."""

    def __init__(self, trace: StorageTrace) -> None:
        self.trace = trace

    def keep(self, tensor: Tensor) -> Tensor:
        kept = super().keep(tensor)
        self.trace.belongs([kept], KEYS)
        return kept


def keys_followed(trace: StorageTrace) -> contextlib.AbstractContextManager:
    """While it lasts, a trace tells the keys and values of long rows, and their gradients, from activations."""
    return patch.object(chain_storage, "OnDevice", partial(_Kept, trace))


def label(runner: StepRunner, layers: int, trace: StorageTrace, optimizer: Any = None) -> None:
    """What weights, gradients and states are and of which layer, those of the model and of a reference."""
    model, reference = runner.model, getattr(runner.reference, "model", None)

    def states_of(parameter: Tensor) -> list[Tensor]:
        states = [] if optimizer is None else list(optimizer.state.get(parameter, {}).values())
        inside = [each for state in states for each in getattr(state, "__dict__", {}).values()]  # GaLore's projector
        return [state for state in (*states, *inside) if isinstance(state, Tensor)]

    policy = set(model.parameters())
    trace.belongs((*policy, *model.buffers()), "weights")
    trace.belongs([tensor.grad for tensor in policy if tensor.grad is not None], "gradients")
    states = [state for tensor in policy for state in states_of(tensor)]
    if hasattr(optimizer, "host_states"):
        place = IN_FILES if isinstance(optimizer.host_states, FileStates) else PINNED
        trace.belongs([state for state in states if state.dim()], place)  # counts of steps stay
    if trace.pages_states:
        trace.belongs([state for state in states if state.numel() >= PAGED_FROM], HOST)
    trace.belongs(states, "optimizer")
    if isinstance(runner.reference, ReferenceModel):
        trace.belongs(runner.reference.beside(model), "reference")
    alike = [model] if reference is None or runner.method_objective.taught else [model, reference]  # a teacher's own
    for stack in filter(None, (stack_of(each, layers) for each in alike)):
        for number, layer in enumerate(stack):
            for tensor in (*layer.parameters(), *layer.buffers()):
                gradient = [] if tensor.grad is None else [tensor.grad]
                trace.belongs([tensor, *gradient, *states_of(tensor)], None, trace.place(number))
