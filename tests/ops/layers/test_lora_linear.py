"""Linear layers with adapters, forward and backward, against PEFT's own modules and autograd."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lowtide.compat.peft import plain_lora
from lowtide.ops.layers.float8 import in_rows, linear
from lowtide.ops.layers.lora_linear import Adapter, Projection, Projections
from tests.support.references.distances import far

SIZES = {"one": 10, "two": 6, "three": 14}


class Layers(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        for name, outputs in SIZES.items():
            self.add_module(name, nn.Linear(8, outputs, bias=bias))

    def forward(self, x):
        return [getattr(self, name)(x) for name in SIZES]


def adapted(bias: bool, drop: float, adapters: tuple[str, ...]) -> tuple[nn.Module, list[Projection]]:
    torch.manual_seed(0)
    model: nn.Module = Layers(bias)
    if adapters:
        patterns = {"two": 5} if "three" in adapters else {}
        config = LoraConfig(
            r=3, rank_pattern=patterns, lora_alpha=4, lora_dropout=drop, target_modules=[*adapters], bias="all"
        )
        model = get_peft_model(model, config).base_model.model
    for p in model.parameters():
        nn.init.normal_(p)
        p.requires_grad_()
    parts = []
    for name in SIZES:
        module = getattr(model, name)
        lora, base = plain_lora(module), getattr(module, "base_layer", module)
        adapter = None if lora is None else Adapter(*lora[:3], lora.dropout if drop else None)
        parts.append(Projection(base.weight, base.bias, adapter))
    return model, parts


@pytest.mark.parametrize("adapters", [(), ("one", "two", "three"), ("two",)], ids=["none", "all", "one"])
@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_pefts(bias, drop, adapters):
    model, parts = adapted(bias, drop, adapters)
    x, grads = torch.randn(9, 8, requires_grad=True), [torch.randn(9, size) for size in SIZES.values()]
    torch.manual_seed(1)
    expected = model(x)
    trained = [each for part in parts for each in part.trained()]
    assert {*map(id, trained)} == {*map(id, model.parameters())}
    of_x, *of_weights = torch.autograd.grad(expected, [x, *trained], grads)

    torch.manual_seed(1)
    layers = Projections(parts, torch.float32)
    with torch.no_grad():
        layers.reduce(x)
        found = [layers.product(x, number) for number in range(3)]
        onto = layers.product(x, 1, onto=grads[1], factor=0.5)
        back = layers.input_gradient(grads)
        layers.weight_gradients(x, grads)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(onto, grads[1] + 0.5 * expected[1])
    torch.testing.assert_close(back, of_x)
    torch.testing.assert_close([layers.found[id(each)] for each in trained], of_weights, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_frozen_weights_get_no_gradient():
    _, parts = adapted(True, 0.0, ("one",))
    kept = parts[0].adapter
    assert kept is not None
    for part in parts:
        for each in part.trained():
            each.requires_grad_(each is kept.second)
    layers = Projections(parts, torch.float32)
    x, grads = torch.randn(4, 8), [torch.randn(4, size) for size in SIZES.values()]
    layers.reduce(x)
    layers.weight_gradients(x, grads)
    assert [*layers.found] == [id(kept.second)]


@torch.no_grad()
def test_gradients_have_the_dtype_of_their_parameters():
    _, parts = adapted(True, 0.0, ("one", "two"))
    layers = Projections(parts, torch.bfloat16)
    x, grads = torch.randn(4, 8).bfloat16(), [torch.randn(4, size).bfloat16() for size in SIZES.values()]
    layers.reduce(x)
    assert layers.product(x, 0).dtype == layers.input_gradient(grads).dtype == torch.bfloat16
    layers.weight_gradients(x, grads)
    assert {each.dtype for each in layers.found.values()} == {torch.float32}


def test_a_weight_that_is_made_for_each_use_is_kept_only_where_it_is_used_again():
    made = []

    def dense(dtype: torch.dtype) -> torch.Tensor:
        made.append(dtype)
        return torch.ones(3, 4, dtype=dtype)

    for again, times in ((False, 2), (True, 1)):
        made.clear()
        layers = Projections([Projection(torch.zeros(2, dtype=torch.uint8), dense=dense)], torch.float32, again=again)
        x = torch.randn(5, 4)
        torch.testing.assert_close(layers.product(x, 0), x @ torch.ones(4, 3))
        layers.input_gradient([torch.randn(5, 3)])
        assert made == [torch.float32] * times


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_in_8_bits(bias):
    torch.manual_seed(0)
    outputs, inputs = (48, 16, 32), 64
    weights = [in_rows(torch.randn(each, inputs)) for each in outputs]
    added = [torch.randn(each).bfloat16() * bias for each in outputs]
    biases = [each if bias else None for each in added]
    adapter = Adapter(torch.randn(4, inputs).bfloat16(), torch.randn(16, 4).bfloat16(), 0.5)
    parts = [
        Projection(
            weight.codes, one, adapter if number == 1 else None, weight.dense, partial(lambda kept: kept, weight)
        )
        for number, (weight, one) in enumerate(zip(weights, biases, strict=True))
    ]
    x, grads = torch.randn(9, inputs).bfloat16(), [torch.randn(9, each).bfloat16() for each in outputs]
    layers = Projections(parts, torch.bfloat16)
    layers.reduce(x)
    found = [layers.product(x, number) for number in range(3)]
    onto = layers.product(x, 1, onto=grads[1], factor=0.5)
    of_others = layers.product(2 * x, 0)
    back = layers.input_gradient(grads)
    for number, weight in enumerate(weights):
        expected = linear(x, weight).double() + added[number]
        if number == 1:
            expected += 0.5 * (x.double() @ adapter.first.double().t()) @ adapter.second.double().t()
            assert far(onto, grads[1].double() + 0.5 * expected) < 8e-3
        assert far(found[number], expected) < 8e-3
    assert far(of_others, linear(2 * x, weights[0]).double() + added[0]) < 8e-3
    exact = sum(grad.double() @ weight.dense(torch.float64) for grad, weight in zip(grads, weights, strict=True))
    exact += 0.5 * (grads[1].double() @ adapter.second.double()) @ adapter.first.double()
    assert 0.01 < far(back, exact) < 0.06
