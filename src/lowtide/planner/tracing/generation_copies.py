"""The copy of a model's weights that it writes by, in a trace: whether a run makes one, and whose its bytes are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lowtide.engine.forward import causal_model
from lowtide.engine.weights.generation_copy import GenerationCopy
from lowtide.memory.optimizers.states import States, optimizer_name, predict_states
from lowtide.planner.devices import Device
from lowtide.planner.tracing.following import stack_of
from lowtide.planner.tracing.trace import StorageTrace
from lowtide.run.writing import chosen_copy


def planned_copy(options: Any, model: nn.Module, layers: int, device: Device) -> GenerationCopy | None:
    """The copy that a run on a device makes of a model to write by; None where it makes none.

    Args:
        layers: of the model that is traced, which has some of those of the run's.
    """
    stack = stack_of(causal_model(model), layers)
    more = causal_model(model).config.get_text_config().num_hidden_layers - layers

    def whole(count: Callable[[nn.Module], int]) -> int:
        """What is counted of a model, of the run's."""
        return count(model) + (0 if stack is None else more * sum(map(count, stack)) // layers)

    def states() -> States:
        name, found = optimizer_name(options), {}
        for each in ("weights", "gradients", "optimizer"):
            found[each] = whole(lambda part, each=each: getattr(predict_states(part, name), each) or 0)
        return States(**found)

    def size(copy: GenerationCopy) -> int:
        return whole(lambda part: copy.bytes_of(model, None if part is model else part))

    return chosen_copy(options, model, size, states, device.memory_bytes if device.kind == "cuda" else None).copy


@contextlib.contextmanager
def traced_copy(copy: GenerationCopy | None, model: nn.Module, layers: int, trace: StorageTrace) -> Iterator[None]:
    """While it lasts, a model runs by a copy, whose bytes count as weights.

    Args:
        layers: of the model, if they are those that the trace follows; else 0.
    """
    if copy is None:
        yield
        return
    with copy.standing_in(model) as made:
        stack = (layers and stack_of(causal_model(model), layers)) or ()
        of_layer = {id(part): trace.place(number) for number, layer in enumerate(stack) for part in layer.modules()}
        for owner, weights in made:
            trace.belongs(weights, "weights", of_layer.get(id(owner)))
        yield
