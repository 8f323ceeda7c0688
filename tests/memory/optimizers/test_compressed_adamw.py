"""Compressed AdamW takes the steps of AdamW on float32 masters, bit by bit; stochastic rounding is right on average."""

import copy

import pytest
import torch
from torch import nn

from lowtide.memory.optimizers import compressed_adamw, masters
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from tests.support.models.tiny_llama import same_bits, tiny_llama, token_ids

SHAPES = [(37, 11), (1,), (3, 5, 7), (2001,)]
BLOCK = 256
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """So that parameters of a test take several blocks, the last of them cut off."""
    monkeypatch.setitem(compressed_adamw.BLOCK, "cpu", BLOCK)


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(torch.bfloat16).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(shape, generator=generator) * 10.0 ** -(step % 6)).bfloat16() for shape in SHAPES]


def take_step(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(trained, gradients(step), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def assert_same(optimizer: CompressedAdamW, compressed, reference: torch.optim.Optimizer, masters) -> None:
    for parameter, master in zip(compressed, masters, strict=True):
        assert same_bits(parameter.data, master.data.bfloat16())
        assert same_bits(optimizer.master(parameter), master.data)
        ours, theirs = optimizer.state[parameter], reference.state[master]
        assert same_bits(ours["exp_avg"], theirs["exp_avg"])
        assert same_bits(ours["exp_avg_sq"].abs(), theirs["exp_avg_sq"])
        assert torch.equal(ours["step"], theirs["step"])


@pytest.mark.slow
@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_two_hundred_steps_are_those_of_float32_masters(rate):
    compressed, masters = parameters(), parameters(torch.float32)
    optimizer = CompressedAdamW(compressed, **{**OPTIONS, "lr": rate(1e-2)})
    reference = torch.optim.AdamW(masters, **{**OPTIONS, "lr": rate(1e-2)}, fused=True)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 150) for o in (optimizer, reference)]
    for step in range(200):
        take_step(optimizer, compressed, step)
        take_step(reference, masters, step)
        for schedule in schedules:
            schedule.step()
    assert_same(optimizer, compressed, reference, masters)
    assert any(optimizer.state[p]["remainder"].any() for p in compressed)


@pytest.mark.parametrize("block", [1 << 16, 1 << 17])
def test_threads_and_blocks_do_not_show(block, monkeypatch):
    monkeypatch.setitem(compressed_adamw.BLOCK, "cpu", block)
    start = torch.randn(200_003).bfloat16()  # threads share what is larger than 32,768 elements
    compressed, masters = [nn.Parameter(start.clone())], [nn.Parameter(start.float())]
    optimizer = CompressedAdamW(compressed, **OPTIONS)
    reference = torch.optim.AdamW(masters, **OPTIONS, fused=True)
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        compressed[0].grad = torch.randn_like(compressed[0])
        masters[0].grad = compressed[0].grad.float()
        optimizer.step()
        torch.set_num_threads(before)
        reference.step()
    assert_same(optimizer, compressed, reference, masters)


def every_kind_of_master() -> torch.Tensor:
    """Each upper half with the lower halves around ties, and random bits: every sign, exponent, NaN and infinity."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    drawn = torch.randint(-(1 << 31), 1 << 31, (1 << 20,)).to(torch.int32)
    return torch.cat([(upper[:, None] + lower).flatten(), drawn]).view(torch.float32)


@pytest.mark.parametrize("moment", [0.0, 3.5])
def test_a_master_comes_back_whatever_its_bits(moment):
    master = every_kind_of_master()
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    exp_avg_sq = torch.full_like(master, moment)
    compressed_adamw.split_master_(master, weight, remainder, exp_avg_sq)
    back = compressed_adamw.joined_master(weight, remainder, exp_avg_sq)
    number = ~master.isnan()
    assert same_bits(weight, master.bfloat16())
    assert same_bits(back[number], master[number])
    assert back[~number].isnan().all()
    assert same_bits(exp_avg_sq.abs(), torch.full_like(master, moment))
    both_ties = (remainder == -masters.TIE) & number
    assert exp_avg_sq[both_ties].signbit().unique().tolist() == [False, True]


def test_float32_parameters_are_stepped_as_torch_does():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    mixed = [*ours[:2], *parameters()[2:]]
    optimizer = CompressedAdamW(mixed, **OPTIONS)
    reference = torch.optim.AdamW(theirs, **OPTIONS, fused=True)
    for step in range(20):
        take_step(optimizer, mixed, step)
        take_step(reference, theirs, step)
    assert all(same_bits(left.data, right.data) for left, right in zip(mixed[:2], theirs[:2], strict=True))
    assert all("remainder" not in optimizer.state[p] for p in mixed[:2])
    assert all(same_bits(m.data, t.data.bfloat16()) for m, t in zip(mixed[2:], theirs[2:], strict=True))


def test_float32_weights_are_compressed_without_a_loss():
    torch.manual_seed(1)
    masters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    masters[0].data.view(torch.int32)[:, 0] &= -0x10000
    masters[0].data.view(torch.int32)[:, 0] |= 0x8000  # ties, before there is any moment
    compressed = [nn.Parameter(master.data.clone()) for master in masters]
    optimizer = CompressedAdamW(compressed, **OPTIONS)
    optimizer.compress_(compressed[:-1])
    assert [p.dtype for p in compressed] == [torch.bfloat16] * 3 + [torch.float32]
    assert all(same_bits(optimizer.master(p), m.data) for p, m in zip(compressed, masters, strict=True))
    optimizer.compress_()
    reference = torch.optim.AdamW(masters, **OPTIONS, fused=True)
    for step in range(5):
        take_step(optimizer, compressed, step)
        take_step(reference, masters, step)
    assert_same(optimizer, compressed, reference, masters)


def llama_loss(model, step: int) -> torch.Tensor:
    ids = token_ids(step % 4)
    return model(input_ids=ids, labels=ids).loss


def test_a_llama_trains_as_with_masters():
    model, bench = tiny_llama(dtype=torch.bfloat16), tiny_llama(dtype=torch.bfloat16)
    optimizer = CompressedAdamW(model.parameters(), **OPTIONS)
    masters = [nn.Parameter(p.detach().float()) for p in bench.parameters()]
    reference = torch.optim.AdamW(masters, **OPTIONS, fused=True)
    for step in range(10):
        llama_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        llama_loss(bench, step).backward()
        for master, parameter in zip(masters, bench.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        reference.step()
        bench.zero_grad()
        for master, parameter in zip(masters, bench.parameters(), strict=True):
            parameter.data.copy_(master.data)
    assert_same(optimizer, model.parameters(), reference, masters)


def half_way(optimizer: CompressedAdamW, parameter: nn.Parameter) -> None:
    """Puts the masters of a parameter half way above even weights, which is what a sign says."""
    with torch.no_grad():
        parameter.view(torch.int16).bitwise_and_(-2)
        optimizer.state[parameter]["remainder"].fill_(-masters.TIE)
        optimizer.state[parameter]["exp_avg_sq"].neg_()


@pytest.mark.parametrize("remainder", compressed_adamw.REMAINDERS)
@pytest.mark.parametrize("layout", ["ties", "signs"])
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(remainder, layout, tmp_path):
    compressed, unsaved = parameters(), parameters()
    optimizer = CompressedAdamW(compressed, **OPTIONS, remainder=remainder)
    uninterrupted = CompressedAdamW(unsaved, **OPTIONS, remainder=remainder)
    for step in range(7):
        take_step(optimizer, compressed, step)
        take_step(uninterrupted, unsaved, step)
    if remainder == "exact":
        half_way(optimizer, compressed[0])
        half_way(uninterrupted, unsaved[0])
    if layout == "ties":
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    else:  # as it was saved before there were ties
        torch.save(torch.optim.Optimizer.state_dict(optimizer), tmp_path / "optimizer.pt")
    resumed = [nn.Parameter(p.detach().clone()) for p in compressed]
    other = CompressedAdamW(resumed, remainder=remainder, seed=1)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for step in range(7, 14):
        take_step(optimizer, compressed, step)
        take_step(uninterrupted, unsaved, step)
        take_step(other, resumed, step)
    for trained, stepped in ((compressed, optimizer), (resumed, other)):
        for left, right in zip(trained, unsaved, strict=True):
            assert same_bits(left.data, right.data)
            assert same_bits(stepped.master(left), uninterrupted.master(right))
            ours, theirs = stepped.state[left], uninterrupted.state[right]
            assert ours.keys() == theirs.keys()
            assert same_bits(ours["exp_avg_sq"], theirs["exp_avg_sq"])


def test_a_checkpoint_is_safe_for_torchs_adamw():
    compressed = parameters()
    optimizer = CompressedAdamW(compressed, **OPTIONS)
    take_step(optimizer, compressed, 0)
    half_way(optimizer, compressed[0])
    masters = [optimizer.master(parameter).clone() for parameter in compressed]
    saved = optimizer.state_dict()
    assert not any(state["exp_avg_sq"].signbit().any() for state in saved["state"].values())
    assert all(same_bits(optimizer.master(p), m) for p, m in zip(compressed, masters, strict=True))

    saved = copy.deepcopy(optimizer.state_dict())
    moments = [state["exp_avg_sq"].clone() for state in saved["state"].values()]
    plain = [nn.Parameter(p.detach().float()) for p in compressed]
    adamw = torch.optim.AdamW(plain, **OPTIONS)
    adamw.load_state_dict(saved)
    assert all(same_bits(adamw.state[p]["exp_avg_sq"], m) for p, m in zip(plain, moments, strict=True))
    take_step(adamw, plain, 1)
    assert all(p.isfinite().all() for p in plain)

    for parameter, stepped in zip(compressed, plain, strict=True):
        parameter.data.copy_(stepped.data)
    back = CompressedAdamW(compressed, **OPTIONS)
    back.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert all(torch.equal(back.master(p), p.float()) for p in compressed)  # remainders were of the weights before
    take_step(back, compressed, 2)


def test_a_state_dict_given_out_can_be_loaded_after_a_step():
    """It holds the states themselves, as torch's does, and shows them as they are then."""
    compressed = parameters()
    optimizer = CompressedAdamW(compressed, **OPTIONS)
    take_step(optimizer, compressed, 0)
    half_way(optimizer, compressed[0])
    given_out = optimizer.state_dict()
    take_step(optimizer, compressed, 1)
    masters = [optimizer.master(parameter).clone() for parameter in compressed]
    other = CompressedAdamW(compressed, **OPTIONS)
    other.load_state_dict(given_out)
    assert all(same_bits(other.master(p), m) for p, m in zip(compressed, masters, strict=True))


def test_a_state_of_torchs_adamw_is_taken():
    masters, compressed = parameters(torch.float32), parameters()
    reference = torch.optim.AdamW(masters, **OPTIONS, fused=True)
    take_step(reference, masters, 0)
    optimizer = CompressedAdamW(compressed, **OPTIONS)
    saved = copy.deepcopy(reference.state_dict())
    optimizer.load_state_dict(saved)
    for parameter, master in zip(compressed, masters, strict=True):
        master.data = master.data.bfloat16().float()
        parameter.data.copy_(master.data)
    take_step(reference, masters, 1)
    take_step(optimizer, compressed, 1)
    assert_same(optimizer, compressed, reference, masters)


def test_another_remainder_may_be_chosen_on_resuming():
    compressed = parameters()
    exact = CompressedAdamW(compressed, **OPTIONS)
    take_step(exact, compressed, 0)
    stochastic = CompressedAdamW(compressed, remainder="stochastic")
    stochastic.load_state_dict(copy.deepcopy(exact.state_dict()))
    take_step(stochastic, compressed, 1)
    for parameter in compressed:
        assert "remainder" not in stochastic.state[parameter]
        assert not stochastic.state[parameter]["exp_avg_sq"].signbit().any()
        assert torch.equal(stochastic.master(parameter), parameter.float())
    exact.load_state_dict(copy.deepcopy(stochastic.state_dict()))
    take_step(exact, compressed, 2)
    assert all("remainder" in exact.state[parameter] for parameter in compressed)


def test_infinite_and_missing_gradients():
    compressed = parameters()
    optimizer = CompressedAdamW(compressed, **OPTIONS)
    before = compressed[1].detach().clone()
    compressed[0].grad = torch.full_like(compressed[0], torch.inf)
    optimizer.step()
    assert optimizer.master(compressed[0]).isnan().all()
    assert compressed[0].isnan().all()
    assert torch.equal(compressed[1], before)
    assert compressed[1] not in optimizer.state


def test_stochastic_rounding_is_right_on_average():
    value = torch.tensor([1.0 + 1 / 512, -3.1415927, 1e-30, 65504.0, 0.0, 1e-40])
    generator = torch.Generator().manual_seed(0)
    master = value.repeat(20_000, 1)
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    compressed_adamw.round_stochastically_(master, weight, generator)
    lower, upper = weight.float().amin(0), weight.float().amax(0)
    assert ((lower <= value) & (value <= upper)).all()
    spread = (upper - lower).clamp(min=1e-45) / 20_000**0.5
    assert ((weight.double().mean(0) - value).abs() <= 3 * spread).all()


def test_stochastic_rounding_leaves_what_is_not_finite():
    master = torch.tensor([torch.inf, -torch.inf, torch.nan])
    master = torch.cat([master, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    compressed_adamw.round_stochastically_(master, weight, torch.Generator().manual_seed(0))
    torch.testing.assert_close(weight.float(), master, equal_nan=True)


@pytest.mark.slow
def test_stochastic_rounding_learns_nearly_as_well_and_plain_bfloat16_does_not():
    losses = {}
    for name in ("exact", "stochastic", "plain"):
        model = tiny_llama(dtype=torch.bfloat16)
        if name == "plain":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            optimizer = CompressedAdamW(model.parameters(), lr=1e-3, remainder=name)
        for step in range(100):
            llama_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = sum(llama_loss(model, step).item() for step in range(4)) / 4
    assert losses["stochastic"] == pytest.approx(losses["exact"], rel=0.05)
    assert losses["exact"] < 0.95 * losses["plain"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["made", "compressed"])
def test_stochastic_rounding_does_not_depend_on_the_order_of_the_parameters_steps(dtype):
    together, alone = parameters(), parameters()
    for parameter in (*together, *alone):
        parameter.data = parameter.data.to(dtype)
    first, second = seeded(together), seeded(alone)
    for step in range(3):
        take_step(first, together, step)
        for parameter, gradient in reversed(list(zip(alone, gradients(step), strict=True))):
            parameter.grad = gradient
            second.step()
            parameter.grad = None
    assert all(same_bits(left.data, right.data) for left, right in zip(together, alone, strict=True))


def test_each_step_rounds_by_other_random_numbers():
    """Two steps from the same weight with the same gradient: those that are rounded up are a half of it, and others."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = CompressedAdamW([weight], lr=2.0**-9, weight_decay=0.0, remainder="stochastic")
    moved = []
    for _ in range(3):
        weight.data.fill_(1.0)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved.append(weight.data != 1.0)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert (moved[one] != moved[other]).double().mean() == pytest.approx(0.5, abs=0.05)


def seeded(trained: list[nn.Parameter], seed: int = 5) -> CompressedAdamW:
    optimizer = CompressedAdamW(trained, **OPTIONS, remainder="stochastic", seed=seed)
    optimizer.compress_()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["made", "compressed"])
def test_stochastic_rounding_is_the_same_on_every_rank(dtype):
    """Whatever each rank's generator has come to."""
    ranks = [parameters(dtype) for _ in range(3)]
    optimizers = []
    for rank, (trained, seed) in enumerate(zip(ranks, (5, 5, 6), strict=True)):
        torch.manual_seed(rank)
        optimizers.append(seeded(trained, seed))
    for step in range(3):
        for trained, optimizer in zip(ranks, optimizers, strict=True):
            take_step(optimizer, trained, step)
    same, other = ([same_bits(a.data, b.data) for a, b in zip(ranks[0], rank, strict=True)] for rank in ranks[1:])
    assert all(same)
    assert not all(other)
    seeds = [state["seed"] for state in optimizers[0].state.values()]
    assert len(set(seeds)) == len(SHAPES)


def test_a_resumed_run_has_the_seed_of_the_first():
    fresh, resumed = parameters(), parameters()
    first, second = seeded(fresh, 5), seeded(resumed, 6)
    second.load_state_dict(CompressedAdamW(parameters(), **OPTIONS, seed=5).state_dict())
    for step in range(2):
        take_step(first, fresh, step)
        take_step(second, resumed, step)
    assert all(same_bits(left.data, right.data) for left, right in zip(fresh, resumed, strict=True))


@pytest.mark.parametrize(("remainder", "state_bytes"), [("exact", 10), ("stochastic", 8)])
def test_bytes_of_a_parameter(remainder, state_bytes):
    compressed = [nn.Parameter(torch.randn(100, 10, dtype=torch.bfloat16))]
    optimizer = CompressedAdamW(compressed, remainder=remainder)
    compressed[0].grad = torch.ones_like(compressed[0])
    optimizer.step()
    large = [v for v in optimizer.state[compressed[0]].values() if isinstance(v, torch.Tensor) and v.dim()]
    assert sum(v.numel() * v.element_size() for v in large) == 1000 * state_bytes
    assert compressed[0].element_size() == 2


def test_a_step_holds_float32_copies_of_a_block_alone():
    weight = nn.Parameter(torch.randn(BLOCK * 100, dtype=torch.bfloat16))
    optimizer = CompressedAdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    sizes = [event.self_cpu_memory_usage for event in profile.events() or []]
    assert max(sizes) <= 8 * BLOCK


def test_what_cannot_be_stepped_is_refused():
    with pytest.raises(ValueError, match="float16"):
        CompressedAdamW([nn.Parameter(torch.ones(2, dtype=torch.float16))])
    with pytest.raises(ValueError, match=r"strides \(1, 2\)"):
        CompressedAdamW([nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t())])
    with pytest.raises(ValueError, match="exact, 8bit, stochastic"):
        CompressedAdamW(parameters(), remainder="none")
