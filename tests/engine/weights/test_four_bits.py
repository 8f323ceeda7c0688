"""A reference in 4 bits, of layers of any size: its numbers are those of the dequantized weights."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("bitsandbytes")

from bitsandbytes import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.weights.reference_storage import in_4_bits


@pytest.mark.parametrize("hidden", [48, 64, 80, 96])
def test_numbers_are_those_of_the_dequantized_weights(hidden: int):
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden + 16, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=61, num_hidden_layers=2, **sizes)).eval()
    plain = copy.deepcopy(model)
    in_4_bits(model, torch.device("cpu"))
    layers = dict(model.named_modules())
    stored = 0
    for name, module in plain.named_modules():
        state = getattr(getattr(layers[name], "weight", None), "quant_state", None)
        if state is not None:
            module.weight.data = functional.dequantize_4bit(layers[name].weight.data, state)
            stored += 1
    assert stored == 14
    ids = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
