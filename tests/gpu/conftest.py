"""Everything in this folder runs on CUDA, and is skipped where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, which this machine does not have")


@pytest.fixture
def peak_above_start():
    """A function that calls another one and returns the bytes that it allocated at its peak above the start."""

    def measure(call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start

    return measure
