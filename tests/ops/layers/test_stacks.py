"""Stacks of experts' weights in few bits: what is stored as a model is loaded, what adapters are made of it, and that
products, gradients and merges are those of the dense stacks that they stand for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowtide.engine.forward import install
from lowtide.engine.weights.complete_weights import load_adapters, load_complete
from lowtide.engine.weights.loading import WITH_EXPERTS, adapt
from lowtide.engine.weights.merging import save_merged
from lowtide.engine.weights.quantized import is_quantized
from lowtide.engine.weights.reference_storage import in_4_bits
from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
from lowtide.ops.layers.stacks import plain_stacks, put_stack_in_4_bits, put_stack_in_float8, stored_stacks
from lowtide.planner.tracing.substitutes.four_bit import store_in_four_bits
from tests.support.models.causal_families import tiny_causal
from tests.support.models.tiny_models import assert_close, build, gradients, loss_of, shared

bitsandbytes = pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
KINDS = ["qwen3_moe", "gpt_oss", "nemotron_h"]
"""With gates, with biases and [experts, in, out], and without gates."""


def four_bits(**more: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **more
    )


def saved(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model: Any = tiny_causal(kind)
    model.save_pretrained(folder)
    return model


def loaded(folder: Path, **more: Any) -> Any:
    return load_complete(AutoModelForCausalLM, str(folder), quantization_config=four_bits(**more))


def stacks(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{each}": stack
        for name, module in model.named_modules()
        for each, stack in stored_stacks(module).items()
    }


def with_adapters(model: Any) -> Any:
    """With adapters that are not 0, the same of each model."""
    config = LoraConfig(r=4, target_modules=WITH_EXPERTS)
    torch.manual_seed(1)
    adapted = adapt(model, config, gradient_checkpointing=False)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.3)
    return adapted


def made_dense(model: Any, like: Any) -> Any:
    """The plain model `like`, whose linear layers and stacks hold what those of a quantized model stand for."""
    dense = copy.deepcopy(like)
    for name, stack in stacks(model).items():
        dense.get_parameter(name).data = stack.dense(torch.float32)
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and is_quantized(weight):
            eye = torch.eye(module.in_features)
            plain = dense.get_submodule(name)
            plain.weight.data = (module(eye) - (0 if plain.bias is None else plain.bias)).t().contiguous()
    return dense


def check_alike(ours: Any, twin: Any) -> None:
    """Both have the same loss and gradients."""
    install(twin)
    install(ours)
    expected, found = loss_of(twin, shared()), loss_of(ours, shared())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    expected.backward()
    found.backward()
    assert_close(gradients(ours), gradients(twin), 2e-5)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_loaded_in_4_bits_has_its_experts_in_them(kind, nested, tmp_path):
    plain = saved(kind, tmp_path)
    model = loaded(tmp_path, bnb_4bit_use_double_quant=nested)
    found = stacks(model)
    assert len(found) == len(plain_stacks(plain)) > 0
    assert not plain_stacks(model)
    for name, stack in found.items():
        weight = plain.get_parameter(name)
        assert stack.shape == weight.shape
        assert (model.get_parameter(name).quant_state.state2 is not None) == nested
        assert 0.08 < (stack.dense(torch.float32) - weight).norm() / weight.norm() < 0.11


def test_experts_that_are_to_be_skipped_stay_as_they_are(tmp_path):
    saved("qwen3_moe", tmp_path)
    assert len(plain_stacks(loaded(tmp_path, llm_int8_skip_modules=["experts"]))) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_dense_stacks(kind, tmp_path):
    plain = saved(kind, tmp_path)
    model = loaded(tmp_path)
    install(model)
    twin = with_adapters(made_dense(model, plain))
    ours = with_adapters(model)
    check_alike(ours, twin)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float8_too(kind):
    torch.manual_seed(0)
    plain: Any = tiny_causal(kind)
    ours, twin = with_adapters(copy.deepcopy(plain)), with_adapters(copy.deepcopy(plain))
    for (experts, name), (others, _) in zip(plain_stacks(ours), plain_stacks(twin), strict=True):
        before = getattr(experts, name).detach()
        put_stack_in_float8(experts, name, CPU)
        dense = stored_stacks(experts)[name].dense(torch.float32)
        assert 0.01 < (dense - before).norm() / before.norm() < 0.04
        getattr(others, name).data = dense
    check_alike(ours, twin)


@pytest.mark.parametrize("form", ["4 bits", "FP8"])
def test_over_tiles_of_tokens(form):
    model: Any = tiny_causal("qwen3_moe")
    for experts, name in plain_stacks(model):
        put = put_stack_in_4_bits if form == "4 bits" else put_stack_in_float8
        put(experts, name, CPU)
    install(model)
    expected = loss_of(model, shared())
    assert install_tiled_mlp(model, 3) > 0
    torch.testing.assert_close(loss_of(model, shared()), expected, rtol=1e-5, atol=0)


def test_frozen_experts_are_multiplied_from_their_codes(tmp_path):
    """With adapters of attention alone."""
    plain = saved("qwen3_moe", tmp_path)
    model = loaded(tmp_path)
    install(model)
    twin = made_dense(model, plain)
    install(twin)
    torch.testing.assert_close(loss_of(model, shared()), loss_of(twin, shared()), rtol=1e-5, atol=0)


def test_adapters_are_those_that_peft_reads_on_the_plain_model(tmp_path):
    plain = saved("qwen3_moe", tmp_path / "base")
    ours = with_adapters(loaded(tmp_path / "base"))
    ours.save_pretrained(tmp_path / "adapter")
    theirs: Any = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    own = {name: p for name, p in ours.named_parameters() if "lora_" in name}
    assert any("experts" in name for name in own)
    assert {name: p.shape for name, p in theirs.named_parameters() if "lora_" in name} == {
        name: p.shape for name, p in own.items()
    }
    again = load_adapters(loaded(tmp_path / "base"), str(tmp_path / "adapter"), is_trainable=True)
    for name, parameter in again.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, own[name])


def test_a_merge_has_the_values_that_were_trained_on(tmp_path):
    plain = saved("qwen3_moe", tmp_path / "base")
    model = loaded(tmp_path / "base")
    install(model)
    twin = with_adapters(made_dense(model, plain))
    ours = with_adapters(model)
    install(ours)
    save_merged(ours, tmp_path / "merged")
    save_merged(twin, tmp_path / "expected")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "expected").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_of_a_reference_in_4_bits_too():
    model = tiny_causal("qwen3_moe")
    in_4_bits(model, CPU)
    assert len(stacks(model)) == 4


def test_a_plan_counts_what_is_stored(tmp_path):
    plain = saved("qwen3_moe", tmp_path)
    config = four_bits(bnb_4bit_use_double_quant=True)
    real = load_complete(AutoModelForCausalLM, str(tmp_path), quantization_config=config)
    store_in_four_bits(plain, config)
    for name, stack in stacks(real).items():
        weight: Any = real.get_parameter(name)
        held = sum(each.nbytes for each in (weight, weight.quant_state.absmax, weight.quant_state.state2.absmax))
        experts, each = plain.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        beside = [buffer for key, buffer in experts.named_buffers() if key.startswith(each)]
        assert held == getattr(experts, each).nbytes + sum(buffer.nbytes for buffer in beside)
        assert stored_stacks(experts)[each].dense(torch.bfloat16).shape == stack.shape


def test_rows_that_are_no_whole_blocks_keep_their_scales(tmp_path):
    """bitsandbytes reads them with others' scales on a CPU: 26% off."""
    plain = build("llama", hidden_size=48)
    plain.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    install(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(module.weight):
            weight: Any = plain.get_submodule(name).weight
            assert (module(torch.eye(module.in_features)).t() - weight).norm() / weight.norm() < 0.11, name
