"""Products of trained weights in 8 bits, against the same layers in float64."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from lowtide import SFTConfig, SFTTrainer
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.memory.kernels.float8_products import in_8_bits, multiply_in_float8
from lowtide.ops.layers.float8 import in_rows
from lowtide.ops.layers.lora_linear import Projection, Projections
from tests.support.marks import slow_but
from tests.support.models.adapted_models import build
from tests.support.references.distances import far
from tests.support.runs.distilling import losses
from tests.support.runs.on_a_cpu import ON_A_CPU

ROWS = [{"text": f"{one} + {one + 3} = {2 * one + 3}"} for one in range(16)]


def test_values_and_gradients_of_a_layer():
    model = build().bfloat16()
    multiply_in_float8(model)
    layer = model.model.layers[0].mlp.up_proj
    exact = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.float64)
    exact.weight.data = layer.weight.detach().double()
    x, grad = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(2, 5, 64).bfloat16()
    wide = x.detach().double().requires_grad_()
    found = torch.autograd.grad(layer(x), (x, layer.weight), grad)
    of_x, of_weight = torch.autograd.grad(exact(wide), (wide, exact.weight), grad.double())
    assert 0.01 < far(layer(x).detach(), exact(wide).detach()) < 0.06
    assert 0.01 < far(found[0], of_x) < 0.06
    assert far(found[1], of_weight) < 5e-3  # not in 8 bits
    assert found[1].dtype == torch.bfloat16


def test_what_fused_layers_compute():
    weight = torch.nn.Parameter(torch.randn(48, 32))
    x, grad = torch.randn(9, 32).bfloat16(), torch.randn(9, 48).bfloat16()
    parts = Projections([Projection(weight, float8=lambda: in_rows(weight.detach()))], torch.bfloat16)
    with torch.no_grad():
        parts.reduce(x)
        out, back = parts.product(x, 0), parts.input_gradient([grad])
        parts.weight_gradients(x, [grad])
    assert 0.01 < far(out, x.double() @ weight.detach().double().t()) < 0.06
    assert 0.01 < far(back, grad.double() @ weight.detach().double()) < 0.06
    assert far(parts.found[id(weight)], grad.double().t() @ x.double()) < 5e-3


def test_which_layers_do_it():
    model = build()
    multiply_in_float8(model)
    names = {name for name, module in model.named_modules() if in_8_bits(module)}
    assert len(names) == 2 * 7
    assert not any("lm_head" in name for name in names)
    adapted = get_peft_model(build(), LoraConfig(r=16, target_modules=["q_proj"]))
    multiply_in_float8(adapted)
    assert not any(in_8_bits(module) for module in adapted.modules())


def test_in_float32_nothing_changes():
    model = build()
    other = copy.deepcopy(model)
    multiply_in_float8(model)
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, other(ids).logits)


def trainer(tmp_path, model=None, **options):
    tokenizer = make_tokenizer()
    given = {"max_steps": 8, "learning_rate": 5e-3, "logging_steps": 1, "bf16": True, "save_strategy": "no"}
    return SFTTrainer(
        model=model or make_model(tokenizer, seed=0),
        args=SFTConfig(output_dir=str(tmp_path), **{**ON_A_CPU, **given, **options}),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("checkpointing", slow_but([False], [False, True]))
def test_a_run_learns_as_in_bfloat16(tmp_path, checkpointing):
    options = {"gradient_checkpointing": checkpointing}
    plain, found = trainer(tmp_path, **options), trainer(tmp_path, float8_products=True, **options)
    plain.train()
    found.train()
    fall = losses(plain)[0] - losses(plain)[-1]
    assert fall > 0.3
    assert not torch.equal(losses(found), losses(plain))
    assert abs(losses(found)[-1] - losses(plain)[-1]) < 0.15 * fall


def test_refused(tmp_path):
    with pytest.raises(ValueError, match="set bf16=True"):
        trainer(tmp_path, float8_products=True, bf16=False)
    frozen = make_model(make_tokenizer(), seed=0)
    for layer in frozen.model.layers:
        layer.requires_grad_(False)
    with pytest.raises(ValueError, match="no layer has a trained matrix"):
        trainer(tmp_path, frozen, float8_products=True)
