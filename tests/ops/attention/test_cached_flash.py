"""Attention to the first keys of stacks by a kernel that is told how many: what is handed to it, and when it serves."""

from __future__ import annotations

import logging

import pytest
import torch

from lowtide.ops.attention import cached_flash
from lowtide.ops.attention.attention_plan import Rules, Sight
from lowtide.ops.attention.cached_attention import gather_from
from lowtide.ops.attention.cached_flash import gather_used, serves, starts_of
from lowtide.ops.target import planning_for
from tests.support.references.flash import flash_of_used

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _untried():
    cached_flash.right_on.cache_clear()
    yield
    cached_flash.right_on.cache_clear()


def test_stacks_see_the_first_of_their_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cached_flash, "cuda_flash_of_used", flash_of_used)
    query, key, value = (torch.randn(4, 1, n, 8, dtype=torch.float64) for n in (3, 10, 10))
    used = torch.tensor([1, 10, 4, 7], dtype=torch.int32)
    hidden = (torch.arange(10) >= used[:, None])[:, None]
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -1e30).double()[:, None]
    # The keys are the first half of what there are places for, as those of completions that have left may be.
    keys, values = (torch.cat([each.masked_fill(hidden[..., None], torch.nan)] * 2)[:4] for each in (key, value))

    out, lse = gather_used(query, keys, values, starts_of(4, 3, 10, CPU), used, 0.7)

    wanted, wanted_lse = gather_from(query, key, value, bias, Rules(0.7))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize(
    ("changes", "dtype", "width", "served"),
    [
        ({}, torch.bfloat16, 64, True),
        ({"sinks": torch.zeros(4)}, torch.bfloat16, 64, True),
        ({"sight": Sight(window=3)}, torch.bfloat16, 64, False),
        ({"softcap": 30.0}, torch.bfloat16, 64, False),
        ({}, torch.float32, 64, False),
        ({}, torch.bfloat16, 32, False),
    ],
)
def test_a_gpu_serves_what_the_kernel_computes(changes: dict, dtype: torch.dtype, width: int, served: bool):
    query, value = torch.zeros(2, 4, 64, dtype=dtype), torch.zeros(2, 2, width, dtype=dtype)
    rules = Rules(0.1, **changes)
    assert not serves(query, value, rules)  # a CPU has a kernel of its own
    with planning_for("cuda", (9, 0)):
        assert serves(query, value, rules) is served
    with planning_for("cuda", (7, 5)):
        assert not serves(query, value, rules)


def test_a_device_whose_kernel_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(cached_flash, "cuda_flash_of_used", flash_of_used)
    assert cached_flash.right_on(CPU, torch.bfloat16, 64)
    assert not caplog.records

    def sees_all(query, key, value, starts, longest, used, scale):
        return flash_of_used(query, key, value, starts, longest, torch.full_like(used, longest[1]), scale)

    def refuses(*given):
        raise RuntimeError("no kernel image")

    for wrong, told in ((sees_all, "since the kernel for it is wrong by"), (refuses, "no kernel image")):
        monkeypatch.setattr(cached_flash, "cuda_flash_of_used", wrong)
        cached_flash.right_on.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert not cached_flash.right_on(CPU, torch.bfloat16, 64)
        assert told in caplog.text
