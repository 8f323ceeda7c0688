"""Optimizers on CUDA: compressed masters, steps in backward and states in host memory equal torch's AdamW, in less
memory."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.memory.optimizers import compressed_adamw
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.host_states import HostStates
from lowtide.memory.optimizers.optimizer_in_backward import OptimizerInBackward

SHAPES = [(370, 110), (1,), (30, 5, 7), (20001,)]


@pytest.mark.parametrize("block", [4096, 1 << 23])
def test_compressed_adamw_equals_float32_masters(block, monkeypatch):
    monkeypatch.setitem(compressed_adamw.BLOCK, "cuda", block)
    compressed = [nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for shape in SHAPES]
    masters = [nn.Parameter(parameter.detach().float()) for parameter in compressed]
    optimizer = CompressedAdamW(compressed, lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(50):
        for parameter, master in zip(compressed, masters, strict=True):
            parameter.grad = torch.randn_like(parameter)
            master.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    for parameter, master in zip(compressed, masters, strict=True):
        assert torch.equal(parameter.data, master.data.bfloat16())
        assert torch.equal(optimizer.master(parameter), master.data)


def test_a_master_comes_back_whatever_its_bits():
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda") << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32, device="cuda")
    master = (upper[:, None] + lower).view(torch.float32)
    weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    exp_avg_sq = torch.zeros_like(master)
    compressed_adamw.split_master_(master, weight, remainder, exp_avg_sq)
    back = compressed_adamw.joined_master(weight, remainder, exp_avg_sq)
    same = back.view(torch.int32) == master.view(torch.int32)
    assert (same | (master.isnan() & back.isnan())).all()


def test_flash_adamw_takes_the_steps_that_it_takes_on_a_cpu():
    torch.manual_seed(0)
    start = torch.randn(20_001).bfloat16()
    weights = [nn.Parameter(start.to(device, copy=True)) for device in ("cpu", "cuda")]
    optimizers = [CompressedAdamW([w], lr=1e-2, remainder="8bit", moment_bits=8) for w in weights]
    for number in range(10):
        grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = grad.to(weight.device)
            optimizer.step()
    on_cpu, on_cuda = (o.master(w).cpu() for o, w in zip(optimizers, weights, strict=True))
    torch.testing.assert_close(
        on_cuda, on_cpu, rtol=1e-3, atol=1e-3
    )  # a moment at the middle of two levels goes to either
    assert (on_cuda != on_cpu).float().mean() < 0.2


WIDTH, LAYERS = 1024, 8
LAYER_BYTES = 4 * WIDTH * WIDTH


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()


def step(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, around: Callable[[], Any] = contextlib.nullcontext
) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).cuda()
    with around():
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def test_steps_in_backward_hold_few_gradients(peak_above_start):
    plain, model = stack(), stack()
    optimizer, other = adamw(plain), adamw(model)
    early = OptimizerInBackward(other)
    for _ in range(4):
        step(plain, optimizer)
        step(model, other, early.armed)
    assert equal(plain, model)
    assert peak_above_start(lambda: step(model, other, early.armed)) < 4 * LAYER_BYTES


@pytest.mark.parametrize("in_backward", [False, True])
def test_states_in_host_memory(in_backward, peak_above_start):
    plain, model = stack(), stack()
    optimizer, other = adamw(plain), adamw(model)
    step(plain, optimizer)
    start = torch.cuda.memory_allocated()
    states = HostStates(other)
    around = OptimizerInBackward(other, step=states.step_alone).armed if in_backward else contextlib.nullcontext
    step(model, other, around)
    assert torch.cuda.memory_allocated() - start < LAYER_BYTES
    for _ in range(4):
        step(plain, optimizer)
        step(model, other, around)
    assert equal(plain, model)
    visitors = 3 * 2 * LAYER_BYTES
    gradients = (3 if in_backward else LAYERS + 1) * LAYER_BYTES
    assert peak_above_start(lambda: step(model, other, around)) < visitors + gradients
    step(plain, optimizer)

    saved, known = other.state_dict(), optimizer.state_dict()["state"]
    for number, theirs in known.items():
        ours = saved["state"][number]
        assert ours["exp_avg"].is_pinned()
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"].cpu())
        assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"].cpu())

    resumed = stack()
    resumed.load_state_dict(model.state_dict())
    third = adamw(resumed)
    HostStates(third)
    third.load_state_dict(saved)
    step(plain, optimizer)
    step(resumed, third)
    assert equal(plain, resumed)
