"""FP8 on CUDA: rows and products against the same on a CPU, and runs beside those in bfloat16."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lowtide.ops.layers.float8 import CAPABILITY, in_rows, input_gradient, multiplies, product
from tests.support.references.distances import far
from tests.support.runs.cuda_sft import build, losses, rows, train


@pytest.fixture(autouse=True)
def _needs_products():
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("this GPU multiplies no 8-bit floats")


@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("width", [16, 896, 14336])
def test_rows_are_those_of_a_cpu(width, with_factors):
    x = (torch.randn(33, width) * torch.logspace(-6, 6, 33)[:, None]).bfloat16()
    factors = torch.rand(width, 1) + 0.1 if with_factors else None
    found = in_rows(x.cuda(), None if factors is None else factors.cuda())
    expected = in_rows(x, factors)
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert torch.equal(found.codes.float().cpu(), expected.codes.float())


def test_products_and_their_gradients():
    x, w, g = (torch.randn(*shape).bfloat16() for shape in ((40, 256), (384, 256), (40, 384)))
    assert multiplies(x.cuda())
    weight, at_home = in_rows(w.cuda()), in_rows(w)
    out, back = product(in_rows(x.cuda()), weight, torch.bfloat16), input_gradient(g.cuda(), weight)
    assert far(out.cpu(), product(in_rows(x), at_home, torch.bfloat16).double()) < 8e-3
    assert far(back.cpu(), input_gradient(g, at_home).double()) < 8e-3
    assert 0.01 < far(back.cpu(), g.double() @ w.double()) < 0.06


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("form", ["base_dtype", "float8_products"])
def test_a_run_learns_as_in_bfloat16(form, fused, tmp_path):
    def run(**options):
        model = build().bfloat16() if form == "base_dtype" else build()
        if form == "base_dtype":
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        return losses(train(tmp_path, model, rows(64, 60, 500), bf16=True, fused_layers=fused, **options))

    plain, found = run(), run(**{form: "float8" if form == "base_dtype" else True})
    assert not torch.equal(plain, found)
    assert (found - plain).abs().max() < 0.05
