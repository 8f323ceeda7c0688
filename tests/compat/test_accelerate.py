"""What `lowtide.compat.accelerate` takes from the inside of accelerate, and replaces there, is there."""

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DynamoBackend
from torch.utils.data import DataLoader

from lowtide.compat.accelerate import SHARED, leave_models_unwrapped, leave_states_in_place, shared_state_kept


@contextlib.contextmanager
def fresh_state() -> Iterator[None]:
    """As in a process in which no other test has made an accelerator."""
    with shared_state_kept():
        for kind in SHARED:
            kind._shared_state.clear()
        yield


def test_the_shared_state_is_as_it_was():
    before = [dict(kind._shared_state) for kind in SHARED]
    with fresh_state():
        Accelerator(cpu=True, mixed_precision="bf16")
        during = [dict(kind._shared_state) for kind in SHARED]
        assert all(during), "PartialState and its kin keep what they share otherwise than in _shared_state"
    assert [dict(kind._shared_state) for kind in SHARED] == before


def test_a_model_is_neither_wrapped_nor_cast():
    with fresh_state():
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        assert "evaluation_mode" in inspect.signature(accelerator.prepare_model).parameters, (
            "Accelerator.prepare_model has no evaluation_mode any more, which leaves a model unwrapped"
        )
        leave_models_unwrapped(accelerator)
        model = torch.nn.Linear(2, 2)
        assert accelerator.prepare(model) is model, "Accelerator.prepare wraps a model past prepare_model"
        out = model(torch.ones(1, 2))
        assert out.dtype == torch.float32, "Accelerator.native_amp no longer decides on a model's autocast"
        assert accelerator.native_amp, "Accelerator.native_amp stays off"
        assert accelerator.state.dynamo_plugin.backend == DynamoBackend.NO


def test_states_are_left_where_they_are():
    with fresh_state():
        accelerator = Accelerator(cpu=True)
        asked = []
        plain = accelerator.prepare_optimizer
        accelerator.prepare_optimizer = lambda optimizer, device_placement=None: asked.append(device_placement)  # type: ignore
        leave_states_in_place(accelerator, lambda _: True)
        accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        assert asked == [False], "Accelerator.prepare places an optimizer past prepare_optimizer"
        assert "device_placement" in inspect.signature(plain).parameters, "prepare_optimizer takes no device_placement"


class TwoByTwo(dict):
    """As a `DeviceMesh` of four ranks, two of which split sequences."""

    mesh_dim_names = ("dp_replicate", "cp")

    def __missing__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: 2)

    def __bool__(self) -> bool:
        return True


def test_ranks_of_a_group_get_the_same_batches():
    given = {}
    with fresh_state():
        accelerator = Accelerator(cpu=True)
        for rank in range(4):
            asked: list[DataLoader] = []
            rows = DataLoader(cast(Any, torch.arange(8)), batch_size=2)
            accelerator._prepare_device_mesh = lambda asked=asked, rows=rows: asked.append(rows)
            accelerator.prepare(rows)
            assert asked == [rows], "Accelerator.prepare makes data loaders without _prepare_device_mesh"
            share = prepare_data_loader(rows, num_processes=4, process_index=rank, torch_device_mesh=TwoByTwo())
            given[rank] = [batch.tolist() for batch in share]
    assert given[0] == given[1] == [[0, 1], [4, 5]], "a data loader gives ranks of a line called `cp` other batches"
    assert given[2] == given[3] == [[2, 3], [6, 7]]
