"""Stepping in backward takes the steps of an ordinary one, bit by bit, and never holds the model's gradients."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from lowtide.engine.forward import causal_model, install, score
from lowtide.memory.optimizers import compressed_adamw, optimizer_in_backward
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.muon import MuonWithAdamW
from lowtide.memory.optimizers.optimizer_in_backward import OptimizerInBackward
from lowtide.objectives.sft import nll
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.models.tiny_llama import same_bits, tiny_llama, token_ids

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: Adafactor(p, lr=1e-2, relative_step=False, scale_parameter=True),
    "adafactor_relative": lambda p: Adafactor(p, warmup_init=True),
    "compressed": lambda p: CompressedAdamW(p, lr=1e-2),
    "stochastic": lambda p: CompressedAdamW(p, lr=1e-2, remainder="stochastic"),
    "flash": lambda p: CompressedAdamW(p, lr=1e-2, remainder="8bit", moment_bits=8),
    "muon": lambda p: MuonWithAdamW(p, [each for group in p for each in group["params"][1:] if each.dim() == 2]),
}
IN_BFLOAT16 = ("compressed", "stochastic", "flash")
HEADS = ["plain", "fused", "fused_loss"]


@pytest.fixture(autouse=True)
def _eight_bits_of_small_parameters(monkeypatch):
    monkeypatch.setattr(compressed_adamw, "LEAST_8BIT", 256)


def build(name: str, *, tied: bool = False, head: str = "plain"):
    """(model, its optimizer with two groups, one parameter frozen)."""
    model = tiny_llama(tied=tied, dtype=torch.bfloat16 if name in IN_BFLOAT16 else torch.float32)
    if head != "plain":
        install(model)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}]
    torch.manual_seed(0)
    return model, OPTIMIZERS[name](groups)


def loss_of(model, head: str, number: int) -> torch.Tensor:
    ids = token_ids(number)
    if head == "plain":
        return model(input_ids=ids, labels=ids).loss
    batch = RaggedBatch.from_segments(ids.tolist())
    if head == "fused_loss":
        loss = score(model, batch, loss=nll, factor=1 / batch.scores, accumulate=True).loss
        assert loss is not None
        return loss
    return -score(model, batch, accumulate=True).scored.mean()


def direct_of(model, head: str) -> list[nn.Parameter]:
    """The weights that add to `.grad` themselves once `install` was there."""
    if head == "plain":
        return []
    inner: Any = causal_model(model)
    return [inner.get_output_embeddings().weight, inner.get_input_embeddings().weight]


def train(
    model, optimizer, head: str, *, steps: int = 3, pieces: int = 2, last: Callable[[], Any] = contextlib.nullcontext
) -> None:
    for step in range(steps):
        for piece in range(pieces):
            with last() if piece == pieces - 1 else contextlib.nullcontext():
                (loss_of(model, head, step * pieces + piece) / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_run(models, optimizers) -> None:
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert same_bits(left.data, right.data)
    saved = [optimizer.state_dict() for optimizer in optimizers]
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    for number, state in saved[0]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(saved[1]["state"][number][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("tied", slow_but([True], [False, True]), ids=["untied", "tied"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_an_ordinary_optimizer(name, head, tied):
    plain, optimizer = build(name, tied=tied, head=head)
    train(plain, optimizer, head)
    model, other = build(name, tied=tied, head=head)
    early = OptimizerInBackward(other, direct=lambda: direct_of(model, head))
    train(model, other, head, last=early.armed)
    assert early.started
    assert_same_run((plain, model), (optimizer, other))


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_checkpointing(reentrant):
    runs = [build("adamw"), build("adamw")]
    for model, _ in runs:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    train(*runs[0], "plain")
    early = OptimizerInBackward(runs[1][1])
    train(*runs[1], "plain", last=early.armed)
    assert_same_run(*zip(*runs, strict=True))


@pytest.mark.parametrize("head", HEADS)
def test_clipping_in_two_passes(head):
    plain, optimizer = build("adamw", tied=True, head=head)
    model, other = build("adamw", tied=True, head=head)
    early = OptimizerInBackward(other, direct=direct_of(model, head))
    for step in range(3):
        for piece in range(2):
            loss_of(plain, head, 2 * step + piece).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert norm > 0.5
        optimizer.step()
        optimizer.zero_grad()
        for around in (early.norm_pass, lambda: early.armed(early.clip_coefficient(0.5))):
            loss_of(model, head, 2 * step).backward()
            with around():
                loss_of(model, head, 2 * step + 1).backward()
            assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(early.total_norm, norm, rtol=1e-6, atol=0)
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_the_norm_of_a_bfloat16_gradient_makes_no_copy_of_it(monkeypatch):
    """It is that of the float32 numbers all the same."""
    monkeypatch.setattr(optimizer_in_backward, "PART", 100)
    weight = torch.nn.Parameter(torch.randn(64, 31, generator=torch.Generator().manual_seed(0)).bfloat16())
    early = OptimizerInBackward(torch.optim.SGD([weight], 0.1))
    given = []
    plain = torch.linalg.vector_norm

    def norm(tensor, **how):
        given.append(tensor)
        return plain(tensor, **how)

    monkeypatch.setattr(torch.linalg, "vector_norm", norm)
    with early.norm_pass():
        (weight.float() ** 2).sum().backward()
    wanted = plain((2 * weight.detach().float()).bfloat16().double())
    torch.testing.assert_close(early.total_norm.double(), wanted, rtol=1e-6, atol=0)
    assert max(tensor.numel() for tensor in given if tensor.dtype == torch.bfloat16) == 100


def test_few_gradients_are_alive_at_once():
    model = tiny_llama(layers=8, tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    early = OptimizerInBackward(optimizer)
    alive = []

    def count(_parameter) -> None:
        alive.append(sum(p.grad.numel() for p in model.parameters() if p.grad is not None))

    with early.armed():
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(count)
        loss_of(model, "plain", 0).backward()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert len(alive) == len(list(model.parameters()))
    assert max(alive) <= 2 * layer
    assert all(p.grad is None for p in model.parameters())


def test_no_hook_stays_and_parameters_without_gradient_are_left():
    model, optimizer = build("adamw")
    unused = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [unused]})
    early = OptimizerInBackward(optimizer)
    with early.armed():
        loss_of(model, "plain", 0).backward()
    frozen = model.model.layers[0].mlp.up_proj.weight
    assert unused not in optimizer.state
    assert frozen not in optimizer.state
    assert torch.equal(unused, torch.ones(3))
    loss_of(model, "plain", 1).backward()
    assert sum(p.grad is not None for p in model.parameters()) == len(list(model.parameters())) - 1


def test_an_exception_stops_the_steps():
    model, optimizer = build("adamw")
    early = OptimizerInBackward(optimizer)
    with pytest.raises(ZeroDivisionError), early.armed():
        loss_of(model, "plain", 1 // 0)
    assert not early.started
    assert not optimizer.state
    seen = []

    def fail(_gradient) -> None:
        seen.append(len(optimizer.state))
        raise MemoryError

    model.model.layers[0].input_layernorm.weight.register_hook(fail)
    with pytest.raises(MemoryError), early.armed():
        loss_of(model, "plain", 0).backward()
    assert early.started
    assert 0 < len(optimizer.state) == seen[0]


def test_a_gradient_that_comes_in_parts_is_found_out():
    weight, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    early = OptimizerInBackward(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(ValueError, match="`direct`"), early.armed():
        backward_twice(weight)
    early = OptimizerInBackward(torch.optim.SGD([other], lr=0.1), direct={other})
    with early.armed():
        backward_twice(other)
    torch.testing.assert_close(other.detach(), torch.full((3,), 0.8))


def backward_twice(weight: nn.Parameter) -> None:
    weight.sum().backward()
    weight.sum().backward()


def test_schedulers_and_accelerate_do_not_notice():
    from accelerate import Accelerator

    model, optimizer = build("sgd")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    early = OptimizerInBackward(Accelerator(cpu=True).prepare(optimizer))
    assert early.optimizer is optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            with early.armed():
                loss_of(model, "plain", step).backward()
            optimizer.step()
            schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.1 / 4)] * 2


class Matrix(torch.optim.Optimizer):
    """Steps by a product of matrices, which autocast would round."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter @ parameter.grad.flatten(1).T @ parameter.grad, alpha=1e-3)


def test_steps_are_outside_of_autocast():
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(16, 16))
        optimizer = Matrix([weight])
        early = OptimizerInBackward(optimizer)
        with torch.autocast("cpu", torch.bfloat16), early.armed() if inside else contextlib.nullcontext():
            weight.square().sum().backward()
        optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Normalized(torch.optim.SGD):
    """Looks at all gradients, as optimizers do that estimate their learning rate."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for gradient in gradients:
            gradient /= sum(g.norm() for g in gradients)
        return super().step(closure)


class Dummy(torch.optim.SGD):
    """Does nothing, as those that step elsewhere."""

    def step(self, closure=None):
        return None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counting, "options of the group"),
        (Normalized, "other weights"),
        (Dummy, "moves no parameter"),
        (torch.optim.LBFGS, "closure"),
    ],
)
def test_optimizers_whose_parameters_depend_on_each_other_are_refused(kind, why):
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=f"{kind.__name__}.*{why}"):
        OptimizerInBackward(kind([weight], lr=0.1))
    assert torch.equal(weight, torch.ones(3))


def test_step_hooks_are_refused():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="step hooks"):
        OptimizerInBackward(optimizer)


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "PagedAdamW32bit"])
def test_bitsandbytes_finds_options_by_the_place_of_a_parameter(kind):
    optim = pytest.importorskip("bitsandbytes.optim")

    def trained(in_backward: bool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 128), nn.Linear(128, 64))
        manager = optim.GlobalOptimManager.get_instance()
        manager.register_module_override(model[2], "weight", {"optim_bits": 32})
        groups = [{"params": [model[0].weight, model[1].bias]}, {"params": [model[1].weight, model[2].weight]}]
        optimizer = getattr(optim, kind)(groups, lr=1e-2)
        armed = OptimizerInBackward(optimizer).armed if in_backward else contextlib.nullcontext
        for step in range(3):
            with armed():
                model(torch.arange(step, step + 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], optimizer.state[model[2].weight]["state1"].dtype

    (together, dtype), (alone, same) = trained(False), trained(True)
    assert dtype == same == torch.float32, "the override was looked up at another place"
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_an_optimizer_is_as_it_was_after_the_trial():
    torch.manual_seed(0)
    model, optimizer = build("adamw")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 1.0))  # starts at zero
    random_state = torch.get_rng_state()
    OptimizerInBackward(optimizer)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not optimizer.state
    assert [group["lr"] for group in optimizer.param_groups] == schedule.get_last_lr() == [0.0, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
