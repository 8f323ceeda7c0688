"""A linear layer with an adapter is what PEFT computes, with its gradients and its dropout."""

import pytest
import torch
from torch import nn

from lowtide.ops.layers.adapted_linear import adapted_linear
from lowtide.ops.layers.lora_linear import Adapter, Projection, Together


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(dropout, bias):
    torch.manual_seed(0)
    base, drop = nn.Linear(6, 5, bias).double(), nn.Dropout(dropout).double()
    first, second = torch.randn(3, 6).double().requires_grad_(), torch.randn(5, 3).double().requires_grad_()
    x, grad = torch.randn(2, 7, 6).double().requires_grad_(), torch.randn(2, 7, 5).double()
    inputs = [x, *base.parameters(), first, second]
    adapter = Adapter(first, second, 0.5, drop if dropout else None)
    found = []
    for fused in (False, True):
        torch.manual_seed(1)
        if fused:
            out = adapted_linear(Together([Projection(base.weight, base.bias, adapter)]), x, torch.float64)
        else:
            dropped = drop(x.float()).double() if dropout else x  # of the rows in their order
            out = base(x) + dropped @ first.T @ second.T * 0.5
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dropout else {}
    torch.testing.assert_close(found[1], found[0], **tolerance)


def test_nothing_is_kept_where_nothing_is_trained():
    part = Projection(torch.randn(5, 6), None, Adapter(torch.randn(3, 6), torch.randn(5, 3), 1.0))
    x = torch.randn(4, 6)
    out = adapted_linear(Together([part]), x, torch.float32)
    assert out.grad_fn is None
    torch.testing.assert_close(out, x @ (part.weight + part.adapter.second @ part.adapter.first).T)
