"""Trimming the host's heap changes no value, and looks once a layer in forward and once in backward."""

import torch
from torch import nn

from lowtide.memory import host_heap


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def test_each_layer_looks_at_the_heap_and_no_gradient_changes(monkeypatch):
    looked = []
    monkeypatch.setattr(host_heap, "_trimmer", lambda: lambda: looked.append(1))
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(4, 8)
    plain = torch.autograd.grad(model(x), list(model.parameters()))
    assert host_heap.trim_while_training(model)
    model(x).backward()
    assert len(looked) == 3 + 3
    assert all(torch.equal(p.grad, expected) for p, expected in zip(model.parameters(), plain, strict=True))


def test_a_forward_without_gradients_looks_once_a_layer(monkeypatch):
    looked = []
    monkeypatch.setattr(host_heap, "_trimmer", lambda: lambda: looked.append(1))
    model = Stack()
    host_heap.trim_while_training(model)
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert len(looked) == 3
