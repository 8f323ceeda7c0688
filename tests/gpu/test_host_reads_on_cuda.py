"""Between the start of a step and its end the host does not wait for the device."""

import pytest
import torch

from tests.support.runs.host_batches import CASES, runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_does_not_wait_for_the_device(name, dtype):
    made = runner(name, "cuda", per_device_train_batch_size=2)
    made.model.to(dtype)
    made.begin()
    batch = CASES[name][2]()
    made.gradients(batch)  # kernels are loaded and chosen
    made.clip()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = made.gradients(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)
