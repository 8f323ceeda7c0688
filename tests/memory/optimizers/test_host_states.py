"""States that live in host memory and visit the device give the steps of an ordinary optimizer.

Here device and host are both the CPU, and the visits are copies all the same; `tests/gpu` has the real thing.
"""

import copy

import pytest
import torch
from transformers.optimization import Adafactor

from lowtide.memory.optimizers import compressed_adamw, host_states
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.host_states import HostStates
from lowtide.memory.optimizers.muon import MuonWithAdamW
from lowtide.memory.optimizers.optimizer_in_backward import OptimizerInBackward
from tests.support.models.tiny_llama import same_bits, tiny_llama, token_ids

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "adafactor": lambda p: Adafactor(p, lr=1e-2, relative_step=False),
    "compressed": lambda p: CompressedAdamW(p, lr=1e-2),
    "flash": lambda p: CompressedAdamW(p, lr=1e-2, remainder="8bit", moment_bits=8),
    "muon": lambda p: MuonWithAdamW(p, [each for group in p for each in group["params"][1:] if each.dim() == 2]),
}


@pytest.fixture(autouse=True)
def _eight_bits_of_small_parameters(monkeypatch):
    monkeypatch.setattr(compressed_adamw, "LEAST_8BIT", 256)


def build(name: str):
    model = tiny_llama(dtype=torch.bfloat16 if name in ("compressed", "flash") else torch.float32)
    parameters = list(model.parameters())
    return model, OPTIMIZERS[name]([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}])


def step(model, optimizer, number: int, armed=None) -> None:
    ids = token_ids(number)
    if armed is None:
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        with armed():
            model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def everywhere(_parameter: torch.Tensor) -> bool:
    return True


def assert_same_run(models, optimizers) -> None:
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert same_bits(left.data, right.data)
    saved = [optimizer.state_dict() for optimizer in optimizers]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    for number, state in saved[0]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(saved[1]["state"][number][name], value, rtol=0, atol=0)


@pytest.fixture
def visits(monkeypatch):
    """Where the states of a parameter lie while it is stepped, by name, at each step of one."""
    seen, inner = [], host_states.step_alone

    def watched(optimizer, group, parameter):
        seen.append({name: value.data_ptr() for name, value in optimizer.state.get(parameter, {}).items()
                     if isinstance(value, torch.Tensor) and value.dim()})  # fmt: skip
        inner(optimizer, group, parameter)

    monkeypatch.setattr(host_states, "step_alone", watched)
    return seen


@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in_backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_an_ordinary_optimizer(name, in_backward, visits):
    plain, optimizer = build(name)
    model, other = build(name)
    states = HostStates(other, offload=everywhere)
    armed = OptimizerInBackward(other, step=states.step_alone).armed if in_backward else None
    for number in range(4):
        step(plain, optimizer, number)
        step(model, other, number, armed)
    assert_same_run((plain, model), (optimizer, other))
    assert len(visits) == 4 * len(list(model.parameters()))


def test_states_are_stepped_on_a_visit_and_return_to_where_they_live(visits):
    model, optimizer = build("adamw")
    HostStates(optimizer, offload=everywhere)
    step(model, optimizer, 0)
    homes = {p: optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()}
    before = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    visits.clear()
    step(model, optimizer, 1)
    assert {p: optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()} == homes
    assert not any(torch.equal(optimizer.state[p]["exp_avg"], b) for p, b in zip(homes, before, strict=True))
    assert len(visits) == len(homes)
    assert all(visit["exp_avg"] not in homes.values() for visit in visits)


def test_states_are_home_before_the_next_but_one_are_brought(monkeypatch):
    """A host that runs ahead of the copies would have all states on the device at once."""
    said = []

    class Mark:
        def synchronize(self) -> None:
            said.append("waited")

    class Lane(host_states.Lane):
        def mark(self):
            return Mark()

        def arrive(self, mark) -> None:
            pass

    class Watched(HostStates):
        def _bring(self, parameter):
            visit = super()._bring(parameter)
            said.append("brought")
            return visit

        def _send(self, parameter, lane, homes) -> None:
            super()._send(parameter, lane, homes)
            said.append("sent")

    monkeypatch.setattr(host_states, "Lane", Lane)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = torch.optim.AdamW(parameters)
    Watched(optimizer, offload=everywhere)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    away = 0
    for word in said:
        away += {"brought": 1, "sent": 0, "waited": -1}[word]
        assert away <= 2
    assert said.count("waited") == 2


def test_torchaos_states_are_refused():
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit

    with pytest.raises(ValueError, match="torchao's AdamW8bit"):
        HostStates(AdamW8bit([torch.nn.Parameter(torch.ones(3))]))


def test_only_chosen_parameters_states_travel(visits):
    plain, optimizer = build("adamw")
    model, other = build("adamw")
    HostStates(other, offload=lambda parameter: parameter.dim() > 1)
    for number in range(3):
        step(plain, optimizer, number)
        if number == 2:
            stayed = {other.state[p]["exp_avg"].data_ptr() for p in model.parameters() if p.dim() == 1}
            visits.clear()
        step(model, other, number)
    assert_same_run((plain, model), (optimizer, other))
    assert {visit["exp_avg"] for visit in visits} & stayed == stayed


def test_on_a_cpu_the_optimizer_steps_as_ever(visits):
    plain, optimizer = build("adamw")
    model, other = build("adamw")
    HostStates(other)
    for number in range(2):
        step(plain, optimizer, number)
        step(model, other, number)
    assert_same_run((plain, model), (optimizer, other))
    assert not visits


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    model, optimizer = build(name)
    HostStates(optimizer, offload=everywhere)
    for number in range(3):
        step(model, optimizer, number)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = copy.deepcopy(model)
    resumed = OPTIMIZERS[name](
        [{"params": list(other.parameters())[:3]}, {"params": list(other.parameters())[3:], "weight_decay": 0.0}]
    )
    HostStates(resumed, offload=everywhere)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=False))
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert_same_run((model, other), (optimizer, resumed))


def test_a_scheduler_made_afterwards_counts_steps(recwarn):
    model, optimizer = build("sgd")
    HostStates(optimizer, offload=everywhere)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    for number in range(2):
        step(model, optimizer, number)
        schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(0.1 / 3)] * 2
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_a_state_dict_of_other_parameters_is_refused():
    _, optimizer = build("adamw")
    _, other = build("sgd")
    HostStates(optimizer, offload=everywhere)
    saved = other.state_dict()
    saved["param_groups"] = saved["param_groups"][:1]
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(saved)
