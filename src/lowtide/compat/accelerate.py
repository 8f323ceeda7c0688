"""What the project takes from the inside of accelerate, and what it replaces there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DynamoBackend

SHARED = (PartialState, AcceleratorState, GradientState)
"""The classes whose instances all share one state, which is that of the last trainer that was made."""


@contextlib.contextmanager
def shared_state_kept() -> Iterator[None]:
    """The state that accelerate keeps for the whole process is afterwards as it was."""
    before = [dict(kind._shared_state) for kind in SHARED]
    try:
        yield
    finally:
        for kind, state in zip(SHARED, before, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)


def leave_models_unwrapped(accelerator: Any) -> None:
    """Replaces `prepare_model` of one accelerator: models are placed, and neither wrapped nor given an autocast.

    Gradients of ranks that hold the same weights are averaged by `lowtide.ranks.replicas`; `engine.forward` has the
    autocast around it; and layers are compiled, not the model.
    """
    prepare = accelerator.prepare_model

    def prepared(model: Any, **options: Any) -> Any:
        mixed, accelerator.native_amp = accelerator.native_amp, False
        try:
            return prepare(model, **{**options, "evaluation_mode": True})
        finally:
            accelerator.native_amp = mixed

    accelerator.prepare_model = prepared
    accelerator.state.dynamo_plugin.backend = DynamoBackend.NO


def leave_states_in_place(accelerator: Any, at_home: Callable[[Any], bool]) -> None:
    """Replaces `prepare_optimizer` of one accelerator, which would move all states to the device.

    Args:
        at_home: whether an optimizer places its states itself.
    """
    prepare = accelerator.prepare_optimizer

    def prepared(optimizer: Any, device_placement: bool | None = None) -> Any:
        return prepare(optimizer, device_placement=False if at_home(optimizer) else device_placement)

    accelerator.prepare_optimizer = prepared
