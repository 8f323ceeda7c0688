"""Between the start of a step and its end nothing of the device is read, and nothing of it is mixed with the host's.

Weights on the meta device stand for a device's: a number cannot be read off such a tensor, and a batch is in host
memory, so that whatever is not sent over fails.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.runs.host_batches import CASES, runner


@pytest.fixture(autouse=True)
def no_autocast_on_meta(monkeypatch):
    """There is none on this device, and torch refuses to be asked."""
    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def entered(kind: str, *args, **kwargs):
        return contextlib.nullcontext() if kind == "meta" else autocast(kind, *args, **kwargs)

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": kind != "meta" and enabled(kind))
    monkeypatch.setattr(torch, "autocast", entered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_nothing_off_the_device(name, checkpointing, dtype):
    made = runner(name, "meta", per_device_train_batch_size=2)
    made.model.to(dtype)
    if checkpointing:
        made.model.gradient_checkpointing_enable()
    made.begin()
    batch = CASES[name][2]()
    loss = made.gradients(batch)
    assert loss.device.type == "meta"
    trained = [p for p in made.model.parameters() if p.grad is not None]
    assert trained
    assert all(p.grad.device.type == "meta" for p in trained)


def test_a_number_of_the_device_cannot_be_read():
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros((), device="meta").item()
    with pytest.raises(RuntimeError):
        torch.zeros(3, device="meta") + torch.zeros(3)
