"""Offloaded activations: no bit of any gradient changes, memory falls, and nothing is left behind."""

import contextlib
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.memory.activations.offloading import ActivationOffload
from lowtide.memory.activations.spill_file import FreeSpace, SpillFile, folder_on_a_disk, is_in_memory
from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
from tests.support.marks import slow_but
from tests.support.models.tiny_models import (
    assert_same,
    build,
    gradients,
    loss_of,
    prepared,
    separate,
    shared,
    with_adapters,
)

CPU = torch.device("cpu")
ADAMW, SGD = partial(torch.optim.AdamW, lr=1e-3), partial(torch.optim.SGD, lr=0.01)
EVERYTHING = partial(ActivationOffload, device=CPU, min_bytes=1)


def checkpointed(model, use_reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def tiled(model):
    install_tiled_mlp(model, 5)
    return model


MODELS = {
    "plain": lambda: prepared(build()),
    "tied": lambda: prepared(build(tie_word_embeddings=True)),
    "bfloat16": lambda: prepared(build(dtype=torch.bfloat16)),
    "adapters": lambda: with_adapters(prepared(build())),
    "dropout": lambda: with_adapters(prepared(build()), lora_dropout=0.2),
    "checkpointed": lambda: checkpointed(prepared(build()), use_reentrant=False),
    "checkpointed_reentrant": lambda: checkpointed(prepared(build()), use_reentrant=True),
    "checkpointed_adapters": lambda: with_adapters(checkpointed(prepared(build()), use_reentrant=False)),
    "tiled": lambda: tiled(prepared(build())),
    "tiled_checkpointed": lambda: tiled(checkpointed(prepared(build()), use_reentrant=False)),
    "soft_caps": lambda: prepared(build("gemma2", num_hidden_layers=2, attn_logit_softcapping=2.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    slow_but(
        [("plain", ADAMW)],
        [*((name, ADAMW) for name in MODELS), ("plain", SGD), ("adapters", SGD)],
        swept=[(name, ADAMW) for name in ("tied", "bfloat16", "checkpointed_reentrant", "tiled", "soft_caps")],
    ),
)
def test_twelve_steps_give_the_same_bits(name, optimizer):
    def train(offloaded: bool):
        torch.manual_seed(5)
        model = MODELS[name]()
        steps = optimizer([p for p in model.parameters() if p.requires_grad])
        offload = EVERYTHING(model)
        for number in range(12):
            if offloaded:
                with offload.around():
                    loss = loss_of(model, shared() if number % 2 else separate(), accumulate=number % 3 == 0)
            else:
                loss = loss_of(model, shared() if number % 2 else separate(), accumulate=number % 3 == 0)
            loss.backward()
            steps.step()
            steps.zero_grad(set_to_none=True)
            assert offload.offloaded_bytes == 0
        assert (offload.peak_offloaded_bytes > 0) == offloaded
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    assert_same(train(offloaded=True), train(offloaded=False))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_backward_may_run_inside(make):
    model = make()
    offload = EVERYTHING(model)
    torch.manual_seed(3)
    loss_of(model, shared()).backward()
    wanted = gradients(model)
    torch.manual_seed(3)
    with offload.around():
        loss_of(model, shared()).backward()
    assert_same(gradients(model), wanted)
    assert offload.peak_offloaded_bytes > 0


def test_of_a_checkpointed_model_only_what_layers_begin_with_leaves():
    plain, checkpoints = prepared(build()), checkpointed(prepared(build()), use_reentrant=False)
    hidden = separate().tokens * 32 * 4
    offloaded = {}
    for model in (plain, checkpoints):
        offload = EVERYTHING(model, min_bytes=hidden)
        with offload.around():
            loss_of(model, separate()).backward()
        offloaded[model] = offload.peak_offloaded_bytes
    # two layers, what the last norm keeps of its input, and the hidden states that the head sees
    assert offloaded[checkpoints] <= 5 * hidden
    assert offloaded[plain] > 20 * hidden


class Recorder:
    """A store that keeps a list of what it is given."""

    def __init__(self):
        self.given, self.freed = [], []

    def needs(self, size):
        return size

    def put(self, tensor):
        stored = Bytes(tensor.untyped_storage().clone())
        self.given.append(stored)
        return stored

    def get(self, stored):
        return stored.storage

    def free(self, stored):
        self.freed.append(stored)


class Bytes:
    def __init__(self, storage):
        self.storage, self.bytes = storage, storage.nbytes()


def recorded(model, **options):
    offload = EVERYTHING(model, **options)
    offload.store = Recorder()
    return offload, offload.store


def test_a_storage_leaves_once_with_all_its_views():
    offload, store = recorded(nn.Module())
    x = torch.randn(4, 6, requires_grad=True)
    with offload.around():
        y = x * 2
        kept = y.exp() + y.sin() + (y.t() ** 2).t() + y[1:].cos().sum()
    expected = torch.autograd.grad(kept.sum(), x)
    assert sorted(each.bytes for each in store.given) == [4 * 6 * 4] * 2  # y, and the output of exp
    y = x * 2
    again = torch.autograd.grad((y.exp() + y.sin() + (y.t() ** 2).t() + y[1:].cos().sum()).sum(), x)
    assert torch.equal(expected[0], again[0])


def test_a_storage_changed_in_place_leaves_again():
    offload, store = recorded(nn.Module())
    x = torch.randn(5, requires_grad=True)
    with offload.around():
        y = x * 2
        kept = (y * y).sum()
        y.mul_(3)
        kept = kept + (y * y).sum()
    (gradient,) = torch.autograd.grad(kept, x)
    torch.testing.assert_close(gradient, 2 * 4 * x.detach() + 2 * 36 * x.detach())
    assert len(store.given) == 2


def test_a_freed_address_is_not_taken_for_its_predecessor():
    offload, store = recorded(nn.Module())
    x = torch.randn(1000, requires_grad=True)
    with offload.around():
        total = torch.stack([(x * factor).sin().sum() for factor in range(1, 20)]).sum()
    (gradient,) = torch.autograd.grad(total, x)
    again = torch.stack([(x * factor).sin().sum() for factor in range(1, 20)]).sum()
    assert torch.equal(gradient, torch.autograd.grad(again, x)[0])
    assert len(store.given) == 19


def test_what_somebody_holds_stays():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)
            self.register_buffer("table", torch.randn(6, 6))

        def forward(self, x, index):
            return (x @ self.weight.t() @ self.frozen[:, :].t() * self.table)[:, index].sum()

    model = Model()
    offload, store = recorded(model)
    leaf, index = torch.randn(6, 6, requires_grad=True), torch.tensor([2, 3])
    with offload.around():
        loss = model(leaf, index)
    assert store.given == []
    loss.backward()
    assert leaf.grad is not None


def test_a_kept_tensor_that_changes_is_an_error_as_ever():
    offload, _ = recorded(nn.Module())
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with offload.around():
        loss = (x * weight).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_sparse_and_subclassed_tensors_pass():
    class Marked(torch.Tensor):
        pass

    offload, store = recorded(nn.Module())
    x = torch.randn(4, 4, requires_grad=True)
    marked = torch.randn(4, 4).as_subclass(Marked)
    sparse = torch.eye(4).to_sparse()
    with offload.around():
        loss = (torch.sparse.mm(sparse, x) * marked).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert store.given == []
    torch.testing.assert_close(torch.as_tensor(gradient), marked.as_subclass(torch.Tensor))


def test_beyond_the_limit_tensors_stay():
    offload, _ = recorded(nn.Module(), max_host_bytes=1000)
    x = torch.randn(100, requires_grad=True)
    with offload.around():
        y = x
        for _ in range(5):
            y = (y * 2).sin()
    assert offload.offloaded_bytes == 800 == offload.peak_offloaded_bytes
    (gradient,) = torch.autograd.grad(y.sum(), x)
    z = x
    for _ in range(5):
        z = (z * 2).sin()
    assert torch.equal(gradient, torch.autograd.grad(z.sum(), x)[0])
    assert offload.offloaded_bytes == 0


def test_a_forward_without_backward_leaves_nothing_behind():
    model = prepared(build())
    offload = EVERYTHING(model)
    length = 0
    for _ in range(3):
        with offload.around():
            loss = loss_of(model, separate())
        assert offload.offloaded_bytes > 0
        del loss
        assert offload.offloaded_bytes == 0
        assert isinstance(offload.store, SpillFile)
        assert offload.store.space.end == 0
        length = length or offload.peak_offloaded_bytes
    assert offload.peak_offloaded_bytes == length

    with contextlib.suppress(RuntimeError), offload.around():
        y = torch.randn(100, requires_grad=True).exp()
        raise RuntimeError("evaluation fails")
    assert offload.offloaded_bytes == 400
    del y
    assert offload.offloaded_bytes == 0


def test_a_graph_can_be_used_twice():
    offload = EVERYTHING(nn.Module())
    x = torch.randn(100, requires_grad=True)
    with offload.around():
        loss = x.exp().sin().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, x)[0], first[0])


RESIDENT = """
import torch
from lowtide.memory.allocators.measure import peak_resident_bytes
from lowtide.memory.activations.offloading import ActivationOffload

def rise(offloaded):
    x = torch.randn(1 << 21, requires_grad=True)  # 8 MiB
    offload = ActivationOffload(torch.nn.Module(), torch.device("cpu"))
    before = peak_resident_bytes()
    with offload.around() if offloaded else torch.enable_grad():
        y = x
        for _ in range(24):
            y = (y * 1.01).sin()
    y.sum().backward()
    return (peak_resident_bytes() - before) >> 20

rise(True)  # so much is there before
print(rise(True), rise(False))
"""


@pytest.mark.slow
def test_resident_memory_falls():
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    offloaded, plain = map(int, done.stdout.split())
    assert plain > 100  # 24 tensors of 8 MiB, and what was there before
    assert offloaded < plain / 2


def test_file_space_is_joined_and_used_again():
    space = FreeSpace()
    a, b, c, d = (space.take(size) for size in (10, 20, 30, 40))
    assert space.end == 100
    space.give_back(b)
    space.give_back(a)
    assert space.take(30) == (0, 30)
    space.give_back(c)
    assert space.take(12) == (30, 12)
    assert space.take(18) == (42, 18)
    assert space.take(1) == (100, 1)
    space.give_back(d)
    assert space.end == 101
    for taken in ((100, 1), (0, 30), (42, 18), (30, 12)):
        space.give_back(type(a)(*taken))
    assert space.end == 0
    assert space.take(5) == (0, 5)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.*activation_offloading_dir"):
        SpillFile(tmp_path / "nowhere")


SHM = Path("/dev/shm")
with_shm = pytest.mark.skipif(not (SHM.exists() and is_in_memory(SHM)), reason="there is no folder in memory")


@with_shm
def test_a_folder_in_memory_is_refused():
    with pytest.raises(ValueError, match=r"/dev/shm stay in memory.*activation_offloading_dir"):
        EVERYTHING(nn.Module(), folder=SHM)


@with_shm
def test_where_temporary_files_are_in_memory_the_output_folder_is_taken(monkeypatch, tmp_path, caplog):
    assert folder_on_a_disk(str(SHM)) is None  # temporary files are on a disk, or nothing is
    monkeypatch.setattr(tempfile, "tempdir", str(SHM))
    assert folder_on_a_disk(str(SHM / "not" / "yet")) is None
    assert SpillFile(None).folder == SHM
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    if is_in_memory(tmp_path):
        pytest.skip("the folder of the test is in memory too")
    assert folder_on_a_disk(str(tmp_path / "not" / "yet")) == tmp_path
    assert SpillFile(folder_on_a_disk(str(tmp_path))).folder == tmp_path
    assert len(caplog.records) == 1


def test_a_full_disk_is_named(monkeypatch):
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        spill = SpillFile()
        with pytest.raises(OSError, match="activation_offloading_dir") as caught:
            spill.put(torch.ones(10))
        assert str(spill.folder) in str(caught.value)
        assert spill.space.end == 0


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="meta"):
        ActivationOffload(nn.Module(), torch.device("meta"))
