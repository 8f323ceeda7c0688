"""Fused layers on CUDA: kernels against plain torch in float64, whole steps against the layers as they were."""

import pytest
import torch
import torch.nn.functional as F

from lowtide.memory.kernels.fused_layers import fuse_layers
from lowtide.ops.layers.layer_kernels import Norm, gate_backward_, gate_product, rms_norm, rms_norm_backward, rotate_
from tests.support.models.fused_families import FAMILIES, WAYS, adapted, family, run
from tests.support.models.tiny_models import (
    RaggedBatch,
    assert_close,
    checkpointed,
    prepared,
    separate,
    shared,
    tokens,
)
from tests.support.references.distances import far

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _whole_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def random(*shape: int, dtype: torch.dtype = torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("width", [64, 896, 4096, 5000])
def test_norm(width, trained, dtype):
    x, grad, add = (random(1300, width, dtype=dtype) for _ in range(3))
    weight = random(width).abs().add(0.5).to(dtype).requires_grad_(trained)
    norm = Norm(weight, 1e-5, 1.0)
    out, scale = rms_norm(x, norm, dtype)
    found, of_weight = rms_norm_backward(grad, x, scale, norm, add)

    wide, factor = x.double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.rms_norm(wide, [width], factor + 1, 1e-5)
    of_x, of_factor = torch.autograd.grad(expected, (wide, factor), grad.double())
    assert far(out, expected.detach()) < TOLERANCE[dtype]
    assert far(found, of_x + add.double()) < TOLERANCE[dtype]
    if trained:
        assert far(of_weight, of_factor) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (32, 8, 128), (3, 1, 80), (8, 8, 256)])
def test_rotation_and_the_way_back(heads, kv_heads, dim, dtype):
    query, key = random(700, heads, dim, dtype=dtype), random(700, kv_heads, dim, dtype=dtype)
    angles = torch.rand(700, dim // 2, device="cuda").mul_(6).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected, back = [], []
    for each in (query, key):
        wide = each.double().clone().requires_grad_()
        one, two = wide.chunk(2, -1)
        turned = wide * cos.double()[:, None] + torch.cat((-two, one), -1) * sin.double()[:, None]
        expected.append(turned.detach())
        back += torch.autograd.grad(turned, wide, each.double().clone())
    grads = query.clone(), key.clone()
    rotate_(query, key, cos, sin)
    rotate_(*grads, cos, sin, back=True)
    for found, wanted in zip((query, key, *grads), (*expected, *back), strict=True):
        assert far(found, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_the_way_back(activation, dtype):
    gate, up, grad = (random(611, 1001, dtype=dtype) for _ in range(3))
    wide = [each.double().clone().requires_grad_() for each in (gate, up)]
    active = F.silu(wide[0]) if activation == "silu" else F.gelu(wide[0], approximate="tanh")
    expected = active * wide[1]
    back = torch.autograd.grad(expected, wide, grad.double().clone())
    assert far(gate_product(gate, up, activation), expected.detach()) < TOLERANCE[dtype]
    gate_backward_(grad, gate, up, activation)
    for found, wanted in zip((grad, gate, up), (expected.detach(), *back), strict=True):
        assert far(found, wanted) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_step_is_that_of_the_layers_as_they_were(kind, way, checkpointing):
    plain, fused = (prepared(adapted(family(kind), way).cuda()) for _ in range(2))
    if checkpointing:
        checkpointed(plain)
        checkpointed(fused)
    fuse_layers(fused)
    for batch in (separate().to("cuda"), shared().to("cuda")):
        wanted_loss, wanted = run(plain, batch)
        loss, got = run(fused, batch)
        torch.testing.assert_close(loss, wanted_loss)
        assert_close(got, wanted, 1e-5)


@pytest.mark.parametrize("way", ["full", "LoRA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_in_16_bits_are_no_larger_than_those_of_the_layers_as_they_were(dtype, way):
    batch, errors = RaggedBatch.from_segments([tokens(40, 1), tokens(70, 2)]), {}
    exact = adapted(family("llama"), way)
    wanted = run(prepared(exact.double()), batch)[1]
    for fuses in (False, True):
        model = prepared(adapted(family("llama"), way).to(dtype).cuda())
        if fuses:
            fuse_layers(model)
        got = run(model, batch.to("cuda"))[1]
        squares = sum(float((got[name].cpu().double() - each).square().sum()) for name, each in wanted.items())
        errors[fuses] = squares / sum(float(each.square().sum()) for each in wanted.values())
    assert errors[True] < 1.1 * errors[False]


@pytest.mark.parametrize("way", ["full", "LoRA"])
def test_the_same_step_twice_has_equal_bits(way):
    found = []
    for _ in range(2):
        model = prepared(adapted(family("llama"), way).bfloat16().cuda())
        checkpointed(model)
        fuse_layers(model)
        found.append(run(model, separate().to("cuda"))[1])
    for name, each in found[0].items():
        assert torch.equal(each, found[1][name]), name
