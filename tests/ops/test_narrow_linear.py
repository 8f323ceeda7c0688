"""Linear layers in 16 bits on a CPU: the numbers of autocast, in few numbers of rows, with one copy of an input."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.engine.layers.linear import install_linear
from lowtide.ops.narrow_linear import AS_THEY_ARE, recurring

BF16 = torch.bfloat16


def layer_and_input(*shape, bias=True, dtype=torch.float32, width=24):
    torch.manual_seed(0)
    layer = nn.Linear(shape[-1], width, bias=bias, dtype=dtype)
    return layer, torch.randn(*shape, dtype=dtype, requires_grad=True)


def products(run):
    """The shapes of what is multiplied while a function runs."""
    with torch.profiler.profile(record_shapes=True) as seen:
        run()
    return [tuple(map(tuple, event.input_shapes[-2:])) for event in seen.events() if event.name == "aten::mm"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 7, 16), (70, 16), (2, 3, 50, 16)], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, BF16], ids=str)
def test_values_and_gradients_are_those_of_autocast(stored, shape, bias):
    layer, x = layer_and_input(*shape, bias=bias, dtype=stored)
    slopes = torch.randn(*shape[:-1], 24, dtype=BF16)
    leaves = [x, *layer.parameters()]
    with torch.autocast("cpu", BF16):
        plain = layer(x)
        wanted = torch.autograd.grad(plain, leaves, slopes)
        install_linear(nn.Sequential(layer))
        found = layer(x)
    assert found.dtype == plain.dtype == BF16
    torch.testing.assert_close(found, plain)
    for own, theirs, leaf in zip(torch.autograd.grad(found, leaves, slopes), wanted, leaves, strict=True):
        assert own.dtype == leaf.dtype
        torch.testing.assert_close(own, theirs, rtol=2e-2, atol=2e-2)


def test_float32_without_autocast_is_as_before():
    layer, x = layer_and_input(70, 16)
    plain = layer(x)
    install_linear(nn.Sequential(layer))
    assert layer(x).grad_fn.name() == plain.grad_fn.name()


def test_numbers_of_rows_recur():
    assert [recurring(rows) for rows in (1, AS_THEY_ARE)] == [1, AS_THEY_ARE]
    for octave in (1 << 9, 1 << 13):
        numbers = {recurring(rows) for rows in range(octave, 2 * octave)}
        assert len(numbers) == 9  # and the next power of two
        assert all(rows <= recurring(rows) < rows * 1.126 for rows in range(octave, 2 * octave))


def test_tokens_that_differ_a_little_are_multiplied_in_one_shape():
    layer, _ = layer_and_input(1, 16, bias=False)
    install_linear(nn.Sequential(layer))

    def run():
        for tokens in (1030, 1077, 1152):
            with torch.autocast("cpu", BF16):
                out = layer(torch.randn(1, tokens, 16, requires_grad=True))
            out.sum().backward()

    assert len(set(products(run))) == 3  # forward, and the gradients of input and weight


@pytest.mark.parametrize("trained", [False, True])
def test_one_copy_of_an_input_waits_for_backward_and_none_of_a_frozen_weights(trained):
    layers = nn.ModuleList(nn.Linear(16, 24, bias=False) for _ in range(3)).requires_grad_(trained)
    install_linear(layers)
    x, saved = torch.randn(70, 16, requires_grad=True), {}

    def keep(tensor):
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", BF16):
        out = sum(layer(x) for layer in layers)
    out.sum().backward()
    weights = {layer.weight.data_ptr() for layer in layers}
    copies = [tensor for place, tensor in saved.items() if place not in weights]
    assert [tuple(tensor.shape) for tensor in copies] == [(96, 16)] * trained


def test_an_input_that_was_changed_is_copied_again():
    layer, _ = layer_and_input(1, 16)
    install_linear(nn.Sequential(layer))
    x = torch.randn(70, 16)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        before = layer(x)
        x.mul_(2)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        assert not torch.equal(layer(x), before)


def test_inference_mode_computes_the_same():
    layer, x = layer_and_input(70, 16)
    install_linear(nn.Sequential(layer))
    with torch.autocast("cpu", BF16):
        expected = layer(x)
        with torch.inference_mode():
            torch.testing.assert_close(layer(x.detach().clone()), expected.detach())
