"""Adapters leave the precision of what they adapt alone, and quantized weights can be trained through; where nobody
names the layers that they are put on, some are chosen."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lowtide.engine.weights.loading import adapt, release_file
from tests.support.models.causal_families import tiny_causal


def tiny_model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_what_a_quantized_model_has_in_16_bits_stays_so():
    model = tiny_model()
    model.is_loaded_in_4bit = True
    adapted = adapt(model, LoraConfig(r=2, target_modules=["q_proj"]), gradient_checkpointing=True)
    kept = {p.dtype for name, p in adapted.named_parameters() if "lora" not in name}
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert kept == {torch.bfloat16}
    assert trained
    assert all("lora" in name for name in trained)


OF_TYPES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, {"q_proj", "v_proj"}),
    "mixtral": ({"num_local_experts": 2, "num_experts_per_tok": 1}, {"q_proj", "v_proj"}),
    "qwen3_moe": (
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
    ),
    "phi3": ({"pad_token_id": 0}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
}
"""By model type, further sizes and the layers that get adapters."""


@pytest.mark.parametrize("kind", OF_TYPES)
def test_layers_are_chosen_where_none_are_named(kind, caplog):
    sizes, expected = OF_TYPES[kind]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    config = AutoConfig.for_model(kind, vocab_size=32, num_key_value_heads=2, eos_token_id=0, **sizes)
    given = LoraConfig(r=2)
    with caplog.at_level(logging.INFO):
        adapted = adapt(AutoModelForCausalLM.from_config(config), given, gradient_checkpointing=False)
    found = {name.split(".lora_A")[0].split(".")[-1] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert found == expected
    assert ("target_modules='all-linear'" in caplog.text) is (kind == "phi3")
    assert ("linear layers outside of experts" in caplog.text) is (kind == "qwen3_moe")
    assert given.target_modules is None  # it is the caller's


@pytest.mark.parametrize(
    ("kind", "parameters", "left"),
    [
        ("llama", None, []),
        ("qwen3_moe", None, []),  # PEFT knows what its experts were before they were stacked
        ("gpt_oss", None, ["experts.down_proj", "experts.gate_up_proj"]),
        ("gpt_oss", ["experts.gate_up_proj"], ["experts.down_proj"]),
        ("gpt_oss", ["experts.gate_up_proj", "experts.down_proj"], []),
    ],
)
def test_experts_that_all_linear_leaves_frozen_are_named(kind, parameters, left, caplog):
    given = LoraConfig(r=2, target_modules="all-linear", target_parameters=parameters)
    with caplog.at_level(logging.WARNING):
        adapt(tiny_causal(kind), given, gradient_checkpointing=False)
    found = [each.getMessage() for each in caplog.records if "routed experts frozen" in each.getMessage()]
    named = [text.partition("set target_parameters=")[2].partition(" or")[0] for text in found]
    assert named == [str(left)] * bool(left)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "llama"])
def test_all_linear_layers_and_experts_in_one_name(kind, caplog):
    given = LoraConfig(r=2, target_modules="all-linear-experts")
    with caplog.at_level(logging.WARNING):
        model = adapt(tiny_causal(kind), given, gradient_checkpointing=False)
    assert ("has no routed experts" in caplog.text) is (kind == "llama")
    assert "routed experts frozen" not in caplog.text
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    layers = model.config.num_hidden_layers
    assert sum(".experts." in name for name in trained) == (0 if kind == "llama" else 2 * 2 * layers)
    assert any("q_proj" in name for name in trained)
    if kind == "gpt_oss":  # as others read it
        assert model.peft_config["default"].target_parameters == ["experts.down_proj", "experts.gate_up_proj"]
    assert given.target_modules == "all-linear-experts"  # it is the caller's


@pytest.mark.parametrize(
    ("kind", "named"),
    [("mamba2", None), ("mamba2", "all-linear"), ("nemotron_h", "all-linear"), ("falcon_h1", "all-linear")],
)
def test_all_linear_layers_are_those_that_peft_adapts(kind, named, caplog):
    given = LoraConfig(r=2, target_modules=named)
    with caplog.at_level(logging.INFO):
        model = adapt(tiny_causal(kind), given, gradient_checkpointing=False)
    trained = {name.partition(".lora_")[0].split(".")[-1] for name, p in model.named_parameters() if p.requires_grad}
    assert "in_proj" in trained
    assert "out_proj" not in trained
    assert given.exclude_modules is None  # it is the caller's
    assert "all linear layers get adapters but for out_proj, which PEFT refuses" in caplog.text


@pytest.mark.parametrize("quantized", [True, False])
def test_experts_that_a_quantized_model_has_in_16_bits_are_told(quantized, caplog):
    model = tiny_causal("qwen3_moe").bfloat16()
    if quantized:  # as bitsandbytes leaves a linear layer
        model.model.layers[0].self_attn.o_proj.weight = torch.nn.Parameter(
            torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False
        )
    with caplog.at_level(logging.WARNING):
        adapt(model, LoraConfig(r=2, target_modules=["q_proj"]), gradient_checkpointing=False)
    told = (
        "not quantized: experts.down_proj, experts.gate_up_proj are stacks and no linear layers, and stay in bfloat16"
    )
    assert (told in caplog.text) is quantized


def test_adapters_of_experts_have_no_dropout():
    given = LoraConfig(r=2, target_modules="all-linear-experts", lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"set lora_dropout=0 \(it is 0\.1\)"):
        adapt(tiny_causal("gpt_oss"), given, gradient_checkpointing=False)
    given = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)  # where PEFT knows the experts by itself
    with pytest.raises(ValueError, match=r"on Qwen3MoeForCausalLM need lora_dropout=0: .* It is 0\.1"):
        adapt(tiny_causal("qwen3_moe"), given, gradient_checkpointing=False)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_quantized_model_lets_go_of_its_file(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = [weight.detach().clone() for weight in model.parameters()]
    if str(tmp_path) not in Path("/proc/self/maps").read_text():
        pytest.skip("the weights were read, not mapped")
    release_file(model)  # as it is, it may go on mapping its weights
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    model.is_loaded_in_4bit = True
    release_file(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert all(torch.equal(weight, other) for weight, other in zip(model.parameters(), before, strict=True))
