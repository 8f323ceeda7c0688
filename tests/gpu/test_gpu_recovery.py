"""CUDA's own out-of-memory is survived, and what was rehearsed is the most that a run takes."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.runs.cuda_sft import build, losses, rows, train

VOCAB, LONGEST = 500, 2000
OPTIONS = {
    "bf16": False,
    "tf32": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 16,
    "max_steps": 3,
}


@pytest.fixture(autouse=True)
def _whole_device() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def peak_of(call) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_reserved()


def test_a_step_that_does_not_fit_is_repeated_in_smaller_micro_batches(tmp_path):
    dataset = rows(64, LONGEST, VOCAB)
    whole = peak_of(lambda: train(tmp_path, build(), dataset, **OPTIONS))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * whole / total)
    short = train(tmp_path, build(), dataset, rehearsal=False, **OPTIONS)
    budget = short.limits.tokens
    assert budget is not None
    torch.cuda.set_per_process_memory_fraction(1.0)
    smaller = train(tmp_path, build(), dataset, tokens_per_microbatch=budget, **OPTIONS)
    torch.testing.assert_close(losses(short), losses(smaller), rtol=1e-4, atol=0)


WAYS = [
    {},
    {"gradient_checkpointing": True},
    {"optim": "adamw_torch"},
    {"optimizer_in_backward": True, "max_grad_norm": 0.0},
]


@pytest.mark.parametrize("more", WAYS, ids=str)
def test_no_step_needs_more_than_the_rehearsed_peak(tmp_path, more):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = train(tmp_path, build(), rows(64, LONGEST, VOCAB), **{**OPTIONS, **more, "max_steps": 4})
    assert torch.cuda.max_memory_allocated() <= 1.03 * run.rehearsed_bytes
