"""The order of copies on a CUDA device, on a CPU."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_layers import GradientCheckpointingLayer

from lowtide.memory.activations.checkpointing import POLICIES, set_checkpointing
from lowtide.memory.activations.offloading import ActivationOffload
from lowtide.memory.allocators.pinned_host import PinnedHost
from tests.support.memory.late_copies import CPU, FakeCuda
from tests.support.models.tiny_models import assert_same, build, gradients, loss_of, prepared, separate, shared


class Host(PinnedHost):
    """Marks its host buffers, so that a copy can tell them from device memory, and knows which are still held."""

    def __init__(self, device, cuda):
        super().__init__(device, cuda)
        self.buffers = []

    @property
    def held(self):
        """How many copies somebody holds."""
        return sum(not buffer.expired() for buffer in self.buffers)

    def buffer(self, size):
        buffer = torch.full((size,), 171, dtype=torch.uint8)
        self.buffers.append(StorageWeakRef(buffer.untyped_storage()))
        buffer.is_host = True  # pyright: ignore[reportAttributeAccessIssue]
        return buffer


def host():
    return Host(CPU, FakeCuda())


def offload_to(store, model, **options):
    offload = ActivationOffload(model, CPU, min_bytes=1, **options)
    offload.store = store
    return offload


@pytest.mark.parametrize("batch", [separate, shared])
@pytest.mark.parametrize(
    ("checkpointing", "policy"),
    [(None, "full"), ({"use_reentrant": True}, "full"), *(({"use_reentrant": False}, policy) for policy in POLICIES)],
)
def test_gradients_are_the_same_bits(batch, checkpointing, policy):
    model = prepared(build())
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
        set_checkpointing(model, policy, kwargs=checkpointing)
    loss_of(model, batch()).backward()
    wanted = gradients(model)
    store = host()
    offload = offload_to(store, model)
    for _ in range(3):
        with offload.around():
            loss = loss_of(model, batch())
        loss.backward()
        assert_same(gradients(model), wanted)
        assert offload.offloaded_bytes == 0
        assert store.held == 0 < len(store.buffers)
    assert offload.peak_offloaded_bytes > 0


def test_few_tensors_are_held_while_they_leave():
    store = host()
    sources = [torch.full((10,), float(n)) for n in range(6)]
    alive = [StorageWeakRef(source.untyped_storage()) for source in sources]
    stored = [store.put(sources.pop(0)) for _ in range(6)]
    assert [ref.expired() for ref in alive] == [True] * 4 + [False] * 2
    for n in reversed(range(6)):
        assert torch.empty(0).set_(store.get(stored[n])).tolist() == [float(n)] * 10


def test_those_that_left_before_set_out_ahead():
    store = host()
    stored = [store.put(torch.full((10,), float(n))) for n in range(6)]
    assert torch.empty(0).set_(store.get(stored[5])).tolist() == [5.0] * 10
    assert [each.back is not None for each in stored] == [False] * 3 + [True] * 2 + [False]
    for n in (4, 3, 2, 1, 0):
        assert torch.empty(0).set_(store.get(stored[n])).tolist() == [float(n)] * 10
    assert all(each.back is None for each in stored)


def test_what_a_layer_keeps_sets_out_in_the_order_of_its_leaving():
    store = host()
    stored = [store.put(torch.full((10,), float(n))) for n in range(8)]
    store.get(stored[3])  # the input of a layer, which has kept the others
    assert [n for n, each in enumerate(stored) if each.back is not None] == [4, 5]
    for n in (4, 5, 6):
        store.get(stored[n])
    assert [n for n, each in enumerate(stored) if each.back is not None] == [2, 7]


def test_a_change_while_what_is_kept_leaves_is_an_error():
    offload = offload_to(host(), nn.Module())
    weight = torch.randn(4, 4, requires_grad=True)

    class Changing(GradientCheckpointingLayer):
        def forward(self, x):
            return (x @ weight).mul_(2).sin()

    layer = Changing()
    set_checkpointing(layer, "matmul")
    with offload.around():
        y = layer(torch.randn(4, 4))
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_what_set_out_and_is_not_asked_for_is_let_go_after_its_copy():
    store = host()
    stored = [store.put(torch.full((10,), float(n))) for n in range(3)]
    store.get(stored[2])
    assert stored[1].back is not None
    back = StorageWeakRef(stored[1].back.untyped_storage())
    store.free(stored[1])
    assert back.expired()
    store.get(stored[0])
    assert not store.into.queue


def test_a_change_during_the_copy_is_an_error():
    store = host()
    x = torch.ones(10)
    stored = store.put(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        store.get(stored)


def test_host_memory_is_bounded():
    store = host()
    offload = offload_to(store, nn.Module(), max_host_bytes=4096)
    x = torch.randn(200, requires_grad=True)  # 800 bytes, 1024 in the pool
    with offload.around():
        y = x
        for _ in range(8):
            y = (y * 2).sin()
    assert offload.offloaded_bytes == 4096
    (gradient,) = torch.autograd.grad(y.sum(), x)
    z = x
    for _ in range(8):
        z = (z * 2).sin()
    assert torch.equal(gradient, torch.autograd.grad(z.sum(), x)[0])
    assert offload.offloaded_bytes == 0


def test_what_is_dropped_before_its_copy_is_done_is_not_held():
    store = host()
    x = torch.ones(10)
    alive = StorageWeakRef(x.untyped_storage())
    stored = store.put(x)
    del x
    assert not alive.expired()
    store.free(stored)
    assert alive.expired()
