"""Moments in 8 bits: numbers come back as the nearest level, training goes nearly as with 32 bits, resumed or not."""

import importlib.util

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.memory.optimizers import compressed_adamw, eight_bit
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.eight_bit import SCALED, EightBitMoment, dequantize, quantize_
from tests.support.models.tiny_llama import same_bits, tiny_llama, token_ids

CPU = torch.device("cpu")


def levels_of(signed: bool) -> torch.Tensor:
    """What each code stands for, at a scale of 1."""
    codes = torch.arange(256, dtype=torch.uint8)
    return dequantize(codes, torch.ones(256 // SCALED), signed=signed)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", [SCALED, 3 * SCALED, 700, 1])
def test_numbers_come_back_as_the_nearest_level(count: int, signed: bool):
    values = torch.randn(count) ** 5
    values = values if signed else values.abs()
    codes, scales = EightBitMoment.zeros(count, CPU, signed=signed)
    quantize_(values, codes, scales, signed=signed)
    levels = levels_of(signed)
    scale = torch.cat([block.abs().max().expand(len(block)) for block in values.split(SCALED)])
    distances = (values / scale)[:, None] - levels
    nearest = distances.abs().min(1).values
    error = (dequantize(codes, scales, signed=signed) - values).abs() / scale
    upper = (values / scale).abs() * 2.0**-7  # what is looked up is a bfloat16 number
    assert (error <= nearest + upper + 1e-7).all()
    assert error.max() < 0.01


def test_zeros_and_the_largest_are_exact():
    values = torch.cat([torch.zeros(SCALED), torch.tensor([3.0, 0.0, -1e-30])])
    codes, scales = EightBitMoment.zeros(len(values), CPU, signed=True)
    assert not dequantize(codes, scales, signed=True).any()
    quantize_(values, codes, scales, signed=True)
    found = dequantize(codes, scales, signed=True)
    assert torch.equal(found, torch.cat([torch.zeros(SCALED), torch.tensor([3.0, 0.0, 0.0])]))


def test_levels_are_dense_where_moments_are():
    for signed, most in ((True, 127), (False, 255)):
        levels = levels_of(signed)
        assert levels.unique().numel() == 256
        assert levels.max() == 1
        assert (levels > 0).sum() in (most, most + 1)
        assert levels[levels > 0].min() < 1e-6


@pytest.mark.slow
def test_a_llama_learns_nearly_as_with_moments_in_32_bits(monkeypatch):
    monkeypatch.setattr(compressed_adamw, "LEAST_8BIT", 0)
    monkeypatch.setitem(compressed_adamw.BLOCK, "cpu", 2 * SCALED)
    losses = {}
    for bits in (8, 32):
        torch.manual_seed(0)
        model = tiny_llama(dtype=torch.bfloat16)
        optimizer = CompressedAdamW(model.parameters(), lr=1e-3, remainder="stochastic", moment_bits=bits)
        before = _mean_loss(model)
        for step in range(100):
            _loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[bits] = _mean_loss(model)
    assert losses[32] < 0.9 * before
    assert losses[8] == pytest.approx(losses[32], rel=0.05)


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    weight = nn.Parameter(torch.randn(5000, dtype=torch.bfloat16))
    optimizer = _eight_bit(weight)
    _steps(optimizer, weight, 0, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = nn.Parameter(weight.detach().clone())
    other = _eight_bit(resumed)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    _steps(optimizer, weight, 3, 6)
    _steps(other, resumed, 3, 6)
    assert same_bits(weight.data, resumed.data)
    assert torch.equal(optimizer.state[weight]["exp_avg"], other.state[resumed]["exp_avg"])


def test_a_large_parameter_takes_two_bytes_of_state_and_a_small_one_keeps_32_bits():
    large, small = (nn.Parameter(torch.ones(count, dtype=torch.bfloat16)) for count in (1 << 16, 100))
    optimizer = CompressedAdamW([large, small], remainder="stochastic", moment_bits=8)
    for parameter in (large, small):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [v for v in optimizer.state[large].values() if isinstance(v, torch.Tensor) and v.dim()]
    assert sum(v.numel() * v.element_size() for v in kept) == large.numel() * 2 * (1 + 4 / SCALED)
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32


def test_an_exact_remainder_has_no_place_beside_them():
    with pytest.raises(ValueError, match="remainder='8bit' or 'stochastic'"):
        CompressedAdamW([nn.Parameter(torch.ones(2))], moment_bits=8)


def _eight_bit(weight: nn.Parameter) -> CompressedAdamW:
    return CompressedAdamW([weight], lr=1e-2, remainder="stochastic", moment_bits=8)


def _steps(optimizer: CompressedAdamW, weight: nn.Parameter, start: int, stop: int) -> None:
    for step in range(start, stop):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = token_ids(step % 4)
    return model(input_ids=ids, labels=ids).loss


@torch.no_grad()
def _mean_loss(model: nn.Module) -> float:
    return sum(_loss(model, step).item() for step in range(4)) / 4


def test_tables_have_values_even_if_a_trace_asks_first():
    spec = importlib.util.find_spec(eight_bit.__name__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)  # which nobody has asked for a table
    spec.loader.exec_module(fresh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        codes, scales = fresh.EightBitMoment.zeros(SCALED, CPU, signed=True)
        fresh.quantize_(torch.randn(SCALED), codes, scales, signed=True)
        fresh.dequantize(codes, scales, signed=True)
    values = torch.cat([torch.zeros(SCALED), torch.tensor([3.0, 0.0, -1e-30])])
    codes, scales = fresh.EightBitMoment.zeros(len(values), CPU, signed=True)
    fresh.quantize_(values, codes, scales, signed=True)
    expected = torch.cat([torch.zeros(SCALED), torch.tensor([3.0, 0.0, 0.0])])
    assert torch.equal(fresh.dequantize(codes, scales, signed=True), expected)
