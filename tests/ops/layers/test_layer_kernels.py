"""What stands between a layer's products: values and gradients against plain torch in float64.

The plain twins run everywhere. The Triton kernels run in Triton's interpreter where it is installed, at sizes that
leave a part of a block over (`TRITON_INTERPRET=1`, which `tests/conftest.py` sets where there is no GPU).
"""

import pytest
import torch
import torch.nn.functional as F

from lowtide.ops.layers import layer_kernels
from lowtide.ops.layers.layer_kernels import Norm, gate_backward_, gate_product, rms_norm, rms_norm_backward, rotate_
from tests.support.marks import NEEDS_TRITON
from tests.support.references.distances import far

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.fixture(params=["plain", pytest.param("triton", marks=NEEDS_TRITON)], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "triton":
        monkeypatch.setattr(layer_kernels, "uses_kernels", lambda x: True)
        monkeypatch.setattr(layer_kernels, "BLOCK", 32)
        monkeypatch.setattr(layer_kernels, "PROGRAMS", 3)
    return request.param


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request, kernels):
    if kernels == "triton" and request.param == torch.float64:
        pytest.skip("the kernels compute in float32")
    return request.param


def random(*shape: int, dtype: torch.dtype = torch.float32):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(dtype, offset, added, trained):
    x, grad, add = (random(7, 20, dtype=dtype) for _ in range(3))
    weight = random(20).abs().add(0.5).to(dtype).requires_grad_(trained)
    norm = Norm(weight, 1e-5, offset)
    out, scale = rms_norm(x, norm, dtype)
    found, of_weight = rms_norm_backward(grad, x, scale, norm, add if added else None)

    wide, factor = x.double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.rms_norm(wide, [20], factor + offset, 1e-5)
    of_x, of_factor = torch.autograd.grad(expected, (wide, factor), grad.double())
    assert out.dtype == found.dtype == dtype
    assert far(out, expected.detach()) < TOLERANCE[dtype]
    assert far(found, of_x + add.double() if added else of_x) < TOLERANCE[dtype]
    assert (of_weight is None) is not trained
    if of_weight is not None:
        assert of_weight.dtype == dtype
        assert far(of_weight, of_factor) < 2 * TOLERANCE[dtype]


def test_a_norm_of_float32_gives_what_products_in_16_bits_take():
    x, norm = random(5, 12), Norm(random(12), 1e-6)
    out, scale = rms_norm(x, norm, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert scale.dtype == torch.float32
    found, _ = rms_norm_backward(out, x, scale, norm)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("turned", [12, 4])
def test_rotation_and_the_way_back(dtype, turned):
    query, key = random(5, 3, 12, dtype=dtype), random(5, 1, 12, dtype=dtype)
    cos, sin = random(5, turned, dtype=dtype), random(5, turned, dtype=dtype)  # whose halves differ, as no family's do
    grads = random(5, 3, 12, dtype=dtype), random(5, 1, 12, dtype=dtype)
    expected, wide = [], [each.double().clone().requires_grad_() for each in (query, key)]
    for each in wide:
        first, rest = each[..., :turned], each[..., turned:]
        one, two = first.chunk(2, -1)
        first = first * cos.double()[:, None] + torch.cat((-two, one), -1) * sin.double()[:, None]
        expected.append(torch.cat((first, rest), -1))
    back = torch.autograd.grad(expected, wide, [each.double().clone() for each in grads])
    rotate_(query, key, cos, sin)
    rotate_(*grads, cos, sin, back=True)
    for found, wanted in zip((query, key, *grads), (*expected, *back), strict=True):
        assert far(found, wanted.detach()) < TOLERANCE[dtype]


ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_and_the_way_back(dtype, activation):
    gate, up, grad = (random(6, 15, dtype=dtype) for _ in range(3))
    wide = [each.double().clone().requires_grad_() for each in (gate, up)]
    expected = ACTIVATIONS[activation](wide[0]) * wide[1]
    back = torch.autograd.grad(expected, wide, grad.double().clone())
    assert far(gate_product(gate, up, activation), expected.detach()) < TOLERANCE[dtype]
    gate_backward_(grad, gate, up, activation)
    for found, wanted in zip((grad, gate, up), (expected.detach(), *back), strict=True):
        assert far(found, wanted) < 1.5 * TOLERANCE[dtype]
