"""Compressed AdamW on CUDA takes the steps of torch's fused AdamW on float32 masters."""

import pytest
import torch
from torch import nn

from lowtide.memory import compressed_adamw
from lowtide.memory.compressed_adamw import CompressedAdamW

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
    compressed_adamw._encode_(master, weight, remainder, exp_avg_sq)
    back = compressed_adamw._decode(weight, remainder, exp_avg_sq)
    same = back.view(torch.int32) == master.view(torch.int32)
    assert (same | (master.isnan() & back.isnan())).all()
