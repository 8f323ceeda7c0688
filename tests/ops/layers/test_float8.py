"""Rows in 8 bits and their products, against float64; the Triton kernel in its interpreter where that is installed."""

import pytest
import torch

from lowtide.ops.layers import float8
from lowtide.ops.layers.float8 import (
    RowScaled,
    fits,
    in_rows,
    input_gradient,
    linear,
    linear_backward,
    multiplies,
    product,
)
from tests.support.marks import NEEDS_TRITON
from tests.support.references.distances import far

HALF_A_STEP = 2**-4
"""Of a number with 3 bits behind the leading one, the most that rounding moves it by, relatively."""
SMALLEST = 2**-10
"""Half of the distance of the smallest numbers of the format."""


@pytest.fixture(params=["plain", pytest.param("triton", marks=NEEDS_TRITON)])
def kernels(request, monkeypatch):
    if request.param == "triton":
        monkeypatch.setattr(float8, "uses_kernels", lambda x: True)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_factors", [False, True])
def test_rows_are_rounded_to_the_nearest_number(kernels, dtype, with_factors):
    x = (torch.randn(7, 20) * torch.logspace(-6, 6, 7)[:, None]).to(dtype)
    x[3] = 0
    factors = torch.rand(20, 1) + 0.1 if with_factors else None
    found = in_rows(x, factors)
    exact = x.double() if factors is None else x.double() * factors.view(-1).double()
    assert found.codes.dtype == torch.float8_e4m3fn
    assert found.scales.shape == (7, 1)
    largest = exact.abs().amax(1)
    scales = found.scales[largest > 0, 0].double()
    least = largest[largest > 0] / 448
    assert ((scales >= least * (1 - 1e-6)) & (scales < 2 * least)).all()
    assert torch.equal(scales.log2(), scales.log2().round())
    off = (found.codes.double() * found.scales.double() - exact).abs()
    assert (off <= 1.001 * (exact.abs() * HALF_A_STEP).maximum(found.scales.double() * SMALLEST)).all()
    if not with_factors:
        assert torch.equal(found.codes.float(), (x.float() / found.scales).to(torch.float8_e4m3fn).float())
    assert found.codes[3].double().abs().sum() == 0


def test_rows_of_any_strides(kernels):
    x = torch.randn(20, 7)
    for strided in (x.t(), x[:1, :1].expand(5, 16), x[::2]):
        found, expected = in_rows(strided), in_rows(strided.contiguous())
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.codes.float(), expected.codes.float())


def exact(rows: RowScaled) -> torch.Tensor:
    return rows.codes.double() * rows.scales.double()


def test_products_are_those_of_the_rounded_factors():
    x, w, g = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((5, 32), (48, 32), (5, 48)))
    weight = in_rows(w)
    rows = in_rows(x)
    assert far(product(rows, weight, torch.bfloat16), exact(rows) @ exact(weight).t()) < 4e-3
    slopes = in_rows(g, weight.scales)
    assert far(input_gradient(g, weight), exact(slopes) @ weight.codes.double()) < 4e-3
    assert far(input_gradient(g, weight), g.double() @ w.double()) < 0.06
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weight.dense(dtype).double(), exact(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_layer_and_its_gradient(dtype):
    x, grad, weight = (
        torch.randn(2, 3, 32, dtype=dtype),
        torch.randn(2, 3, 48, dtype=dtype),
        in_rows(torch.randn(48, 32)),
    )
    out, back = linear(x, weight), linear_backward(grad, weight)
    assert out.dtype == back.dtype == dtype
    rounded = dtype == torch.bfloat16  # others stay as exact as the weight is
    assert multiplies(x) is rounded
    for found, expected in (
        (out, x.double() @ exact(weight).t()), (back, grad.double() @ exact(weight))
    ):  # fmt: skip
        assert far(found, expected) < (0.05 if rounded else 1e-3)
        assert far(found, expected) > 0.01 or not rounded


def test_which_weights_are_stored():
    assert fits(torch.empty(48, 32))
    assert not fits(torch.empty(48, 30))
    assert not fits(torch.empty(3, 48, 32))
