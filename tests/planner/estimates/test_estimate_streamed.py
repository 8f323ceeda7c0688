"""Estimates know which weights are not resident."""

import contextlib
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoConfig, LlamaConfig

from lowtide import DPOConfig, SFTConfig
from lowtide.planning import estimate

SIZES: dict[str, Any] = {
    "vocab_size": 8_000,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
TEXTS, PAIRS = [300, 200, 250, 120], [(60, 120, 200)] * 4
LAYER = 4 * (192 * 192 * 2 + 192 * 64 * 2 + 3 * 192 * 768 + 2 * 192)
ENDS = 4 * 8_000 * 192
"""Bytes of the head, and of the embedding."""
ADAPTERS = 4 * 8 * 7 * (4 * 192 + 2 * (192 + 64) + 3 * (192 + 768))


def weights(config: type, lengths: Any, device: str = "cpu", *, lora: bool = True, **options: Any) -> dict[str, int]:
    """The most that weights, and a reference's, hold in forward and in backward; and what lies elsewhere."""
    made = config(output_dir="run", use_cpu=True, bf16=False, report_to="none", **options)
    peft_config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    found = estimate(made, LlamaConfig(**SIZES), lengths=lengths, device=device, peft_config=peft_config)
    assert found.peak_bytes > 0
    most = {
        name: max(found.phases[phase].get(name, 0) for phase in ("forward", "backward"))
        for name in ("weights", "reference", "optimizer")
    }
    return {**most, "elsewhere": found.host_bytes}


@pytest.mark.slow
def test_a_streamed_base_takes_a_layer():
    resident = weights(SFTConfig, TEXTS)
    streamed = weights(SFTConfig, TEXTS, base_weights="stream")
    assert resident["weights"] == pytest.approx(7 * LAYER + 2 * ENDS + ADAPTERS, rel=0.01)
    assert LAYER + ADAPTERS <= streamed["weights"] <= 1.01 * (2 * LAYER + ADAPTERS)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"base_weights": "stream"}, {"optim": "adamw_lora_fa"}], ids=str)
def test_what_goes_by_adapters_is_estimated_by_the_name_of_the_method(options):
    """Rows are prepared on a model without adapters, which once refused it."""
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    common = {"peft_config": adapters, "lengths": TEXTS}
    plain = {"use_cpu": True, "bf16": False, "report_to": "none"}
    made = SFTConfig(output_dir="run", **plain, **options)
    wanted = estimate(made, LlamaConfig(**SIZES), **common)
    found = estimate("sft", LlamaConfig(**SIZES), config={**plain, **options}, **common)
    for name in ("weights", "optimizer"):
        assert found.phases["backward"][name] == pytest.approx(wanted.phases["backward"][name], abs=64)


@pytest.mark.slow
def test_on_a_gpu_the_layers_wait_in_pinned_memory():
    streamed = weights(SFTConfig, TEXTS, "H100-80GB", base_weights="stream")
    assert 7 * LAYER <= streamed["elsewhere"] <= 2 * 7 * LAYER
    rest = 2 * ENDS + ADAPTERS
    assert LAYER + rest <= streamed["weights"] <= 1.01 * (3 * LAYER + rest)


@pytest.mark.slow
def test_a_streamed_reference_takes_a_layer():
    resident = weights(DPOConfig, PAIRS, lora=False)
    streamed = weights(DPOConfig, PAIRS, lora=False, base_weights="stream")
    assert resident["reference"] > 7 * LAYER + 2 * ENDS
    assert streamed["reference"] <= 0.05 * resident["reference"]
    assert streamed["weights"] <= resident["weights"] + max(LAYER, ENDS)


@pytest.mark.slow
def test_trained_weights_and_moments_in_a_file():
    options = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
    resident = weights(SFTConfig, TEXTS, lora=False, **options)
    streamed = weights(SFTConfig, TEXTS, lora=False, **options, trained_weights="stream")
    assert resident["optimizer"] > 2 * 7 * LAYER
    assert streamed["weights"] <= 1.01 * (ENDS + LAYER)
    assert streamed["optimizer"] <= 0.1 * resident["optimizer"]


@pytest.mark.slow
def test_trained_weights_and_moments_in_host_memory():
    options = {"optimizer_in_backward": True, "max_grad_norm": 0.0, "per_device_train_batch_size": 4}
    resident = weights(SFTConfig, TEXTS, "H100-80GB", lora=False, **options)
    streamed = weights(SFTConfig, TEXTS, "H100-80GB", lora=False, **options, trained_weights="stream")
    assert resident["weights"] == pytest.approx(7 * LAYER + 2 * ENDS, rel=0.01)
    assert 2 * ENDS + 2 * LAYER <= streamed["weights"] <= 1.02 * (2 * ENDS + 3 * LAYER)
    assert streamed["optimizer"] <= 0.1 * resident["optimizer"]
    assert 3 * 7 * LAYER + 4 * ENDS <= streamed["elsewhere"] <= 2 * (3 * 7 * LAYER + 4 * ENDS)


@pytest.mark.slow
def test_gradients_of_several_micro_batches_wait_in_host_memory():
    options = {"optimizer_in_backward": "two_pass", "trained_weights": "stream", "per_device_train_batch_size": 1}
    one = weights(SFTConfig, TEXTS, "H100-80GB", lora=False, **options)
    several = weights(SFTConfig, TEXTS, "H100-80GB", lora=False, **options, gradient_accumulation_steps=2)
    assert several["elsewhere"] >= one["elsewhere"] + 7 * LAYER
    assert several["weights"] <= one["weights"] + 1.02 * LAYER


@pytest.mark.parametrize(("model_type", "refused"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_experts_that_are_joined_as_they_are_loaded_lie_in_no_file(model_type, refused):
    """As the run refuses them, so do estimates, with the way out."""
    described = AutoConfig.for_model(
        model_type, vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, num_experts=4, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    adapters = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    made = SFTConfig(output_dir="run", use_cpu=True, bf16=False, report_to="none", base_weights="stream")
    with (
        pytest.raises(ValueError, match=r"experts are joined as they are loaded. Quantize")
        if refused
        else contextlib.nullcontext()
    ):
        assert estimate(made, described, lengths=[16] * 2, device="cpu", peft_config=adapters).peak_bytes > 0
