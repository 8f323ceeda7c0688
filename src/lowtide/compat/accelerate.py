"""What the project takes from the inside of accelerate, and what it replaces there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DynamoBackend
from torch.distributed.device_mesh import init_device_mesh

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


def share_batches(accelerator: Any, ranks: int) -> None:
    """Has the data loaders of one accelerator give the same batches to so many neighbouring ranks, as accelerate does
    for context parallelism; its own option would also cut the batches.

    Replaces `_prepare_device_mesh`: the mesh in the state, which that reads, is the last trainer's.
    """
    groups = (accelerator.num_processes // ranks, ranks)
    mesh = init_device_mesh(accelerator.device.type, groups, mesh_dim_names=("dp_replicate", "cp"))
    accelerator._prepare_device_mesh = lambda: mesh
