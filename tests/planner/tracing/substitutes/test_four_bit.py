"""4-bit layers are traced as what bitsandbytes stores of them, and what it makes for each product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig

import lowtide
from lowtide.planner.tracing.described_model import materialized
from lowtide.planner.tracing.substitutes.four_bit import FourBitLinear
from lowtide.planning import estimate

SIZES = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
IN_LAYERS = 7 * (4 * 256 * 256 + 3 * 256 * 512)
"""Weights that are quantized."""
ADAPTERS = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def four_bits(**options) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16", **options)


def predicted(folder: Path, quantization_config, **more) -> lowtide.Estimate:
    args = lowtide.SFTConfig(str(folder), use_cpu=True, report_to="none", model_init_kwargs={"dtype": "bfloat16"})
    adapters = {"peft_config": ADAPTERS} | more
    described = LlamaConfig(**SIZES)
    return estimate(args, described, lengths=[64] * 8, quantization_config=quantization_config, **adapters)


@pytest.mark.slow
@pytest.mark.parametrize(("double", "bits"), [(False, 4 + 32 / 64), (True, 4 + 8 / 64 + 32 / 64 / 256)])
def test_layers_hold_their_codes_and_scales(tmp_path: Path, double: bool, bits: float):
    dense, quantized = predicted(tmp_path, None), predicted(tmp_path, four_bits(bnb_4bit_use_double_quant=double))
    saved = dense.phases["forward"]["weights"] - quantized.phases["forward"]["weights"]
    assert saved == pytest.approx(IN_LAYERS * (2 - bits / 8), rel=1e-3)
    loading = sum(size for name, size in quantized.phases["loading"].items() if name not in ("runtime", "cache"))
    assert loading < 1.2 * quantized.phases["forward"]["weights"]  # never are all weights there as numbers


@pytest.mark.slow
def test_layers_that_are_streamed_take_one(tmp_path: Path):
    """Of 4-bit weights, scales included, as of others."""
    args = lowtide.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", base_weights="stream")
    found = estimate(
        args, LlamaConfig(**SIZES), lengths=[64] * 8, quantization_config=four_bits(), peft_config=ADAPTERS
    )
    adapters = 7 * 4 * (4 * 2 * 256 + 3 * (256 + 512)) * 4
    layer = IN_LAYERS // 7 * (4 + 32 / 64) / 8
    assert found.phases["backward"]["weights"] - adapters < 3 * layer


def test_a_product_is_of_a_copy_of_the_weight():
    made = []

    class Layer(FourBitLinear):
        def dense(self, dtype):
            made.append(super().dense(dtype))
            return made[-1]

    layer = Layer(nn.Linear(8, 4).bfloat16(), double=True, compute_dtype=torch.bfloat16)
    x = torch.ones(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert [(each.shape, each.dtype) for each in made] == [((4, 8), torch.bfloat16)] * 2
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_shared_weights_stay_shared():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
    assert materialized(model)[1].weight is model[0].weight
    assert model[0].weight.device.type == "cpu"


def test_what_is_stored_is_what_bitsandbytes_stores():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    real = bitsandbytes.nn.Linear4bit(512, 256, bias=False, compress_statistics=True, quant_type="nf4")
    real.load_state_dict({"weight": torch.randn(256, 512)})
    real = real.to("cpu")
    state = real.weight.quant_state
    held = sum(each.nbytes for each in (real.weight, state.absmax, state.state2.absmax))
    ours = FourBitLinear(nn.Linear(512, 256, bias=False), double=True, compute_dtype=torch.float32)
    assert held == sum(each.nbytes for each in (*ours.parameters(), *ours.buffers()))


def test_other_quantizations_and_missing_adapters_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="not traced, but for load_in_4bit"):
        predicted(tmp_path, BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(ValueError, match="cannot be trained themselves"):
        predicted(tmp_path, four_bits(), peft_config=None)
