"""Everything in this folder runs on CUDA, and is skipped where there is none."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first product; else none is deterministic


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, which this machine does not have")


@pytest.fixture
def peak_above_start():
    """A function that calls another one and returns the bytes that it held at its peak above the start; those too that
    were freed and cannot be used again before another stream has done with them."""

    def measure(call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_stats()["active_bytes.all.current"]
        call()
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["active_bytes.all.peak"] - start

    return measure
