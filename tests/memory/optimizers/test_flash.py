"""FlashAdamW: masters of 24 bits and companded moments are those of a plain reference, saved or not."""

import copy
import math

import pytest
import torch
from torch import nn

from lowtide.memory.optimizers import compressed_adamw
from lowtide.memory.optimizers.companding import GROUPED, CompandedMoment
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.masters import joined_master_24, split_master_24_
from tests.support.models.tiny_llama import same_bits, tiny_llama, token_ids

CPU = torch.device("cpu")
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
COUNT = 5000
"""Of a parameter's numbers: several blocks and a group that is cut off."""
EDGE = 1e-3
"""How near to the middle of two levels a number may lie that goes to either of them."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setitem(compressed_adamw.BLOCK, "cpu", 4 * GROUPED)


def flash(*trained: nn.Parameter, **options) -> CompressedAdamW:
    return CompressedAdamW([*trained], **{**OPTIONS, **options}, remainder="8bit", moment_bits=8)


def weight_of(count: int = COUNT) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter((torch.randn(count) * 10.0 ** torch.randint(-6, 2, (count,))).bfloat16())


def gradient(step: int, count: int = COUNT) -> torch.Tensor:
    """Of sizes that differ from group to group, and within one."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.linspace(-8, 1, count) + torch.randn(count, generator=torch.Generator().manual_seed(0))
    return (torch.randn(count, generator=generator) * 10.0**sizes).bfloat16()


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int8)
    split_master_24_(master, weight, remainder)
    return weight, remainder


# -- masters ---------------------------------------------------------------------------------------------------------


def test_a_master_of_24_bits_comes_back_whatever_its_bits():
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7F, 0x80, 0x81, 0xFF], dtype=torch.int32) << 8
    master = (upper[:, None] + lower).view(torch.float32)
    back = joined_master_24(*split(master))
    assert (same_places(back, master) | (master.isnan() & back.isnan())).all()


def test_a_number_goes_to_the_nearest_master_and_its_weight_is_the_nearest_of_that():
    torch.manual_seed(0)
    numbers = torch.randn(100_000) * 10.0 ** torch.randint(-30, 30, (100_000,))
    numbers = torch.cat([numbers, torch.tensor([1 + 2**-16, 1 + 3 * 2**-16, -1 - 2**-16, 2 - 2**-20, 0.0, -0.0])])
    weight, remainder = split(numbers)
    steps = torch.where(numbers == 0, 1.0, 2.0 ** (numbers.double().abs().log2().floor() - 15))  # between masters
    nearest = (numbers.double() / steps).round() * steps  # to even, as torch rounds
    assert torch.equal(joined_master_24(weight, remainder).double(), nearest)
    assert ((weight.double() - nearest).abs() <= 128 * steps).all()


def test_what_is_no_number_stays_none():
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert odd.isnan().all()
    assert joined_master_24(*split(odd)).isnan().all()
    large = torch.tensor([torch.inf, -torch.inf, 3.4e38])
    torch.testing.assert_close(joined_master_24(*split(large)), large, rtol=2**-16, atol=0)


def same_places(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.view(torch.int32) == right.view(torch.int32)


# -- moments ---------------------------------------------------------------------------------------------------------


def bent(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers that are rounded to codes, the scale of each), a group at a time, as the paper writes it."""
    codes, scales = [], []
    for group in values.double().split(GROUPED):
        kept = group if signed else group.sqrt()
        scale = kept.abs().max().clamp(min=1e-30)
        share = kept / scale
        codes.append(127 * 2 * share / (1 + share.abs()) if signed else 255 * share)
        scales.append(scale.expand(len(group)))
    return torch.cat(codes), torch.cat(scales)


def unbent(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    scales = scales.double().repeat_interleave(GROUPED)[: len(codes)]
    if not signed:
        return (codes.double() / 255 * scales) ** 2
    share = codes.double() / 127
    return share / (2 - share.abs()) * scales


def assert_codes(codes: torch.Tensor, values: torch.Tensor, signed: bool) -> None:
    """They are those of the values, except where a number lies in the middle of two."""
    wanted, _ = bent(values, signed)
    if not signed:
        wanted = wanted.clamp(min=1)
    distance = (codes.double() - wanted).abs()
    assert distance.max() <= 0.5 + EDGE
    assert codes.double().abs().max() == (127 if signed else 255)


@pytest.mark.parametrize("count", [GROUPED, 1000, 1])
@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
def test_a_moment_is_companded_as_the_paper_says(count, signed):
    torch.manual_seed(0)
    values = torch.randn(count) ** 5
    values = values if signed else values.square()
    moment = CompandedMoment(*CompandedMoment.zeros(count, CPU, signed=signed), signed)
    assert not moment.read().any()
    moment.write(values)
    assert_codes(moment.stored, values, signed)
    assert moment.scales is not None
    torch.testing.assert_close(moment.read().double(), unbent(moment.stored, moment.scales, signed), rtol=1e-6, atol=0)
    _, scales = bent(values, signed)
    wide = moment.read() if signed else moment.read().sqrt()
    error = (wide - (values if signed else values.sqrt())).abs() / scales
    assert error.max() <= (0.0081 if signed else 0.0040)


def test_what_was_rounded_is_rounded_to_itself():
    values = torch.randn(3 * GROUPED)
    for signed, kept in ((True, values), (False, values.square())):
        moment = CompandedMoment(*CompandedMoment.zeros(len(values), CPU, signed=signed), signed)
        moment.write(kept)
        codes = moment.stored.clone()
        moment.write(moment.read())
        assert torch.equal(moment.stored, codes)


def test_zeros_stay_zeros():
    for signed in (True, False):
        moment = CompandedMoment(*CompandedMoment.zeros(GROUPED, CPU, signed=signed), signed)
        moment.write(torch.zeros(GROUPED))
        assert torch.equal(moment.read(), torch.zeros(GROUPED))


@pytest.mark.slow
def test_moments_decay_where_no_gradients_come():
    weight = weight_of()
    optimizer = flash(weight, betas=(0.9, 0.999))
    take_steps(optimizer, [weight], 0, 1)
    state = optimizer.state[weight]
    before = state["exp_avg_sq_scale"].clone()
    for _ in range(200):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    torch.testing.assert_close(state["exp_avg_sq_scale"], before * 0.999**100, rtol=1e-4, atol=0)


def test_no_weight_leaps_where_the_second_moment_is_far_below_its_groups_largest():
    weight = nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
    optimizer = flash(weight, weight_decay=0.0)
    for step in range(20):
        grad = torch.full((COUNT,), 1e-3)
        grad[::GROUPED] = 1.0 if step % 2 else -1.0  # a first moment near zero, a large second one
        weight.grad = grad.bfloat16()
        optimizer.step()
    before = optimizer.master(weight)
    for _ in range(5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert (optimizer.master(weight) - before).abs().max() < 5 * 1e-2


# -- steps -----------------------------------------------------------------------------------------------------------


def test_each_step_is_that_of_adamw_rounded_plainly():
    weight = weight_of()
    optimizer = flash(weight)
    lr, (beta1, beta2), eps, decay = (OPTIONS[name] for name in ("lr", "betas", "eps", "weight_decay"))
    first = second = torch.zeros(COUNT, dtype=torch.float64)
    for step in range(1, 13):
        master, grad = optimizer.master(weight).double(), gradient(step).double()
        weight.grad = gradient(step)
        optimizer.step()
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
        wide = (second / (1 - beta2**step)).sqrt() + eps
        wanted = master * (1 - lr * decay) - lr / (1 - beta1**step) * first / wide
        state = optimizer.state[weight]
        assert_codes(state["exp_avg"], first, True)
        assert_codes(state["exp_avg_sq"], second, False)
        steps = 2.0 ** (wanted.abs().log2().floor() - 15)
        off = (optimizer.master(weight).double() - wanted).abs()
        assert (off <= 0.51 * steps + 2**-22 * master.abs()).all()  # the step itself is taken in float32
        first = unbent(state["exp_avg"], state["exp_avg_scale"], True)
        second = unbent(state["exp_avg_sq"], state["exp_avg_sq_scale"], False)


@pytest.mark.slow
def test_updates_that_bfloat16_would_lose_add_up():
    weight = nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
    optimizer = flash(weight, lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    rounded = 100 * 2**-17  # by half of the distance between two masters in each step
    assert optimizer.master(weight).mean().item() == pytest.approx(1 - 100 * 1e-4, abs=rounded)
    assert weight.mean().item() == pytest.approx(0.99, rel=2**-8)


def test_small_parameters_are_stepped_as_float32_masters():
    small, master = nn.Parameter(weight_of(100).data), nn.Parameter(weight_of(100).data.float())
    optimizer, reference = flash(small), torch.optim.AdamW([master], **OPTIONS, fused=True)
    for step in range(20):
        small.grad = gradient(step, 100)
        master.grad = small.grad.float()
        optimizer.step()
        reference.step()
    assert same_bits(optimizer.master(small), master.data)
    assert same_bits(small.data, master.data.bfloat16())


def test_float32_weights_are_split_into_masters_of_24_bits():
    torch.manual_seed(0)
    weight, small = nn.Parameter(torch.randn(COUNT)), nn.Parameter(torch.randn(9))
    values, few = weight.detach().clone(), small.detach().clone()
    optimizer = flash(weight, small)
    optimizer.compress_()
    assert weight.dtype == small.dtype == torch.bfloat16
    assert torch.equal(optimizer.master(weight), joined_master_24(*split(values)))
    assert ((optimizer.master(weight) - values) / values).abs().max() <= 2**-16
    assert same_bits(optimizer.master(small), few)


def test_a_large_parameter_takes_five_bytes_and_its_scales():
    weight = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    optimizer = flash(weight)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.dim()]
    assert sum(v.nbytes for v in kept) + weight.nbytes == weight.numel() * (5 + 2 * 4 / GROUPED)


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    trained = [weight_of(), weight_of(100)]
    optimizer = flash(*trained)
    take_steps(optimizer, trained, 0, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = [nn.Parameter(weight.detach().clone()) for weight in trained]
    other = flash(*resumed)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(optimizer, trained, 3, 6)
    take_steps(other, resumed, 3, 6)
    for left, right in zip(trained, resumed, strict=True):
        assert same_bits(left.data, right.data)
        for name, value in optimizer.state[left].items():
            assert torch.equal(other.state[right][name], value)
            assert other.state[right][name].dtype == value.dtype


def test_states_of_float32_moments_are_taken_over():
    weight, plain = weight_of(), weight_of()
    before = torch.optim.AdamW([plain], **OPTIONS)
    take_steps(before, [plain], 0, 2)
    optimizer = flash(weight)
    optimizer.load_state_dict(before.state_dict())
    take_steps(optimizer, [weight], 2, 3)
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[weight]["remainder"].dtype == torch.int8


def test_codes_of_another_kind_are_refused():
    weight = weight_of()
    other = CompressedAdamW([weight], remainder="stochastic", moment_bits=8)
    take_steps(other, [weight], 0, 1)
    with pytest.raises(ValueError, match=r"8-bit codes of another optimizer .*'8bit'.*begin without them"):
        flash(weight_of()).load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"8-bit codes of another optimizer .*'exact'"):
        CompressedAdamW([weight_of()]).load_state_dict(copy.deepcopy(other.state_dict()))


def take_steps(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], start: int, stop: int) -> None:
    for step in range(start, stop):
        for weight in trained:
            weight.grad = gradient(step, weight.numel())
        optimizer.step()


@pytest.mark.slow
def test_a_llama_learns_as_in_float32(monkeypatch):
    monkeypatch.setattr(compressed_adamw, "LEAST_8BIT", 0)
    losses = {}
    for name in ("float32", "flash"):
        torch.manual_seed(0)
        model = tiny_llama(dtype=torch.float32)
        options = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
        if name == "flash":
            optimizer: torch.optim.Optimizer = flash(*model.parameters(), **options)
            optimizer.compress_()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **options)
        for step in range(100):
            ids = token_ids(step % 4)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses[name] = sum(model(input_ids=token_ids(k), labels=token_ids(k)).loss.item() for k in range(4)) / 4
    assert losses["float32"] < 0.7 * math.log(64)
    assert losses["flash"] == pytest.approx(losses["float32"], rel=0.03)
