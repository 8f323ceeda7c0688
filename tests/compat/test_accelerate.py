"""What `lowtide.compat.accelerate` takes from the inside of accelerate, and replaces there, is there."""

import contextlib
import inspect
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

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
