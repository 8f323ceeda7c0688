"""Trained layers whose weights wait in pinned memory, on a CPU: streams that copy as late as their events allow.

What is asked of CUDA is played by the stand-ins of `test_pinned_host`: a copy that nobody waited for has not run, so
that a missing wait shows as a wrong number.
"""

import pytest
import torch

from lowtide.engine.forward import install
from lowtide.memory.optimizers import host_states
from lowtide.memory.optimizers.optimizer_in_backward import OptimizerInBackward
from lowtide.memory.optimizers.streamed_states import StreamedStates
from lowtide.memory.weights.streaming import stream_of
from lowtide.memory.weights.trained_layers import TrainedLayers
from lowtide.run import optimizers, streamed_weights
from lowtide.run.streamed_weights import attach_trained
from lowtide.step.updaters.in_backward import InBackward
from tests.support.memory.late_copies import CPU, FakeCuda
from tests.support.models.tiny_models import build, checkpointed, loss_of, separate
from tests.support.runs.streamed_runs import WRITTEN, assert_all_resumes, assert_like, outcome, saved, sft

STEPS, LAYERS = 3, 4


class Layers(TrainedLayers):
    """Counts what of a layer's bytes is on the device."""

    def __init__(self):
        super().__init__(CPU, FakeCuda())
        self.most = 0

    def buffer(self, size):
        made = torch.empty(size, dtype=torch.uint8)
        made.is_host = True
        return made

    def bring(self, unit, following):
        super().bring(unit, following)
        self.most = max(self.most, len(self._visits) + len(self._leaving))


def models(optim, kwargs):
    """A model and its optimizer: resident, and streamed with its stream."""
    for streams in (False, True):
        model = build(num_hidden_layers=LAYERS)
        install(model)
        if kwargs is not None:
            model.enable_input_require_grads()
            checkpointed(model, kwargs=kwargs)
        stream = attach_trained(model, Layers(), CPU) if streams else None
        yield model, optim(model.parameters()), stream


def assert_same_weights(left, right):
    right = dict(right.named_parameters())
    assert [name for name, p in left.named_parameters() if not torch.equal(p, right[name])] == []


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_the_steps_in_backward_are_those_of_resident_weights(name, kwargs):
    (plain, one, _), (model, other, stream) = models(OPTIMIZERS[name], kwargs)
    assert stream is not None
    states = other.host_states = StreamedStates(other, stream, CPU)
    in_backward = InBackward(other, model, max_grad_norm=0.1)
    for _ in range(STEPS):
        loss_of(plain, separate()).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        one.step()
        one.zero_grad()
        for around in (in_backward.steps.norm_pass, in_backward.stepping):
            with around():
                with stream.store.around():
                    loss = loss_of(model, separate())
                loss.backward()
        other.step()
        torch.testing.assert_close(in_backward.norm, norm)
    stream.settle()
    wanted = dict(plain.named_parameters())
    for each, got in model.named_parameters():
        # a step of 1e-2 in the direction of a tiny gradient, whose last bits depend on the processor
        torch.testing.assert_close(got, wanted[each], rtol=1e-5, atol=2e-6)
    assert stream.store.most <= 3
    assert not stream.store._visits
    assert not states._arriving


def test_without_clipping_the_bits_are_the_same():
    (plain, one, _), (model, other, stream) = models(OPTIMIZERS["fused"], None)
    assert stream is not None
    steps = OptimizerInBackward(other, step=StreamedStates(other, stream, CPU).step_alone)
    for _ in range(STEPS):
        loss_of(plain, separate()).backward()
        one.step()
        one.zero_grad()
        with steps.armed():
            with stream.store.around():
                loss = loss_of(model, separate())
            loss.backward()
    stream.settle()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_of_several_micro_batches_wait_on_the_host(name):
    (plain, one, _), (model, other, stream) = models(OPTIMIZERS[name], None)
    assert stream is not None
    StreamedStates(other, stream, CPU)
    for _ in range(STEPS):
        for _ in range(3):
            loss_of(plain, separate()).backward()
            with stream.store.around():
                loss = loss_of(model, separate())
            loss.backward()
        stream.settle()
        homes = stream.store._homes
        for unit in stream.units:
            for weight in unit.weights:
                assert weight.grad.data_ptr() == homes[unit].gradients[weight].data_ptr()
        wanted = {n: p.grad for n, p in plain.named_parameters()}
        assert [n for n, p in model.named_parameters() if not torch.equal(p.grad, wanted[n])] == []
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
    stream.settle()
    assert_same_weights(model, plain)


def test_a_state_dict_has_what_was_stepped_last():
    _, (model, other, stream) = models(OPTIMIZERS["sgd"], None)
    assert stream is not None
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    steps = OptimizerInBackward(other, step=StreamedStates(other, stream, CPU).step_alone)
    with steps.armed():
        with stream.store.around():
            loss = loss_of(model, separate())
        loss.backward()
    saved = model.state_dict()
    assert [name for name, p in saved.items() if torch.equal(p, before[name]) and p.dim() > 1] == []
    storages = {p.untyped_storage().data_ptr() for p in saved.values()}
    assert len(storages) == len({p.data_ptr() for p in saved.values()})
    model.load_state_dict(before)
    with torch.no_grad():
        again = loss_of(model, separate())
    torch.testing.assert_close(again, loss_of(build_loaded(before), separate()).detach())


def build_loaded(state):
    model = build(num_hidden_layers=LAYERS)
    install(model)
    model.load_state_dict(state)
    return model


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Whatever asks where weights are trained hears of a GPU, which the CPU plays."""
    for module in (optimizers, streamed_weights):
        monkeypatch.setattr(module, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(host_states, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(streamed_weights, "TrainedLayers", Played)


class Played(Layers):
    def __init__(self, device):
        super().__init__()


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainer_takes_the_steps_of_resident_weights(tmp_path, as_on_a_gpu, accumulated):
    name = saved(tmp_path / "model")
    options = {"learning_rate": 2e-3, "weight_decay": 0.1, "gradient_accumulation_steps": accumulated}
    options["per_device_train_batch_size"] = 4 // accumulated
    wanted = outcome(sft(name, tmp_path / "out", peft=None, max_grad_norm=0.1, **options))
    trainer = sft(name, tmp_path / "out", peft=None, **WRITTEN, **options)
    assert isinstance(stream_of(trainer.model).store, Layers)
    assert_like(outcome(trainer), wanted)


@pytest.mark.slow
def test_a_run_that_is_resumed_gives_the_same_bits(tmp_path, as_on_a_gpu):
    assert_all_resumes(tmp_path)


def test_optimizers_that_store_weights_otherwise_are_refused(tmp_path, as_on_a_gpu):
    with pytest.raises(ValueError, match="adamw_torch_fused"):
        sft(saved(tmp_path / "model"), tmp_path / "out", peft=None, **WRITTEN, optim="adamw_compressed")
