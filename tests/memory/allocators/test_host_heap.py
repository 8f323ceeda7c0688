"""Settling the host's heap changes no value; a large model's layers look at it in forward and in backward."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide.memory.allocators import host_heap


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


@pytest.fixture
def looked(monkeypatch):
    """How often a layer looked, with every model taken for a large one."""
    times = []
    monkeypatch.setattr(host_heap, "LARGE", 0)
    monkeypatch.setattr(host_heap, "trim_heap", lambda: times.append(1))
    return times


def test_each_layer_looks_at_the_heap_and_no_gradient_changes(looked):
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(4, 8)
    plain = torch.autograd.grad(model(x), list(model.parameters()))
    if not host_heap.settle_heap(model):
        pytest.skip("no glibc here")
    model(x.requires_grad_()).backward()
    assert len(looked) == (3 + 1) + (3 + 1)  # each layer as it begins, and after the last
    assert all(torch.equal(p.grad, expected) for p, expected in zip(model.parameters(), plain, strict=True))


def test_a_forward_without_gradients_looks_once_a_layer_and_after_the_last(looked):
    model = Stack()
    if not host_heap.settle_heap(model):
        pytest.skip("no glibc here")
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert len(looked) == 3 + 1


def test_a_small_model_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_heap, "trim_heap", lambda: pytest.fail("looked"))
    model = Stack()
    assert not host_heap.settle_heap(model)
    model(torch.randn(4, 8)).backward()


def test_a_small_model_that_gathers_maps_what_is_whole_for_a_moment_and_trims_besides(monkeypatch):
    said = {}
    heap = SimpleNamespace(mallopt=said.__setitem__)
    monkeypatch.setattr(host_heap, "glibc", lambda: heap)
    times = []
    monkeypatch.setattr(host_heap, "trim_heap", lambda near=None: times.append(near))
    model = Stack()
    assert host_heap.settle_heap(model, gathers=True)
    assert said[host_heap.M_MMAP_THRESHOLD] == host_heap.MMAP_ABOVE
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert times == [None, None, None, 1]  # before the head in any case
    monkeypatch.setattr(host_heap, "LARGE", 0)
    assert host_heap.settle_heap(Stack(), gathers=True)
    assert said[host_heap.M_MMAP_THRESHOLD] == host_heap.MMAP_ABOVE_OF_LARGE


def test_a_trim_gives_memory_back():
    heap = host_heap.glibc()
    if heap is None:
        pytest.skip("no glibc here")
    kept, holes = [], []
    for _ in range(80):  # 1 MB that goes beside a kilobyte that stays
        holes.append(torch.ones(1 << 18))
        kept.append(torch.ones(1 << 8))
    heap.mallopt(host_heap.M_TRIM_THRESHOLD, 2**31 - 1)
    holes.clear()
    from lowtide.memory.allocators.measure import resident_bytes

    before = resident_bytes()
    host_heap.trim_heap(near=1)
    assert resident_bytes() < before - (20 << 20)


def test_holes_are_kept_while_the_process_held_more_before(monkeypatch):
    trims = []
    heap = SimpleNamespace(mallinfo2=lambda: SimpleNamespace(fordblks=1 << 30), malloc_trim=trims.append)
    monkeypatch.setattr(host_heap, "glibc", lambda: heap)
    monkeypatch.setattr(host_heap, "peak_resident_bytes", lambda: 1600)
    for now, due in ((1490, 0), (1510, 1)):  # a sixteenth is 100
        monkeypatch.setattr(host_heap, "resident_bytes", lambda now=now: now)
        host_heap.trim_heap()
        assert len(trims) == due
    monkeypatch.setattr(host_heap, "resident_bytes", lambda: 1)
    host_heap.trim_heap(near=1)
    assert len(trims) == 2
