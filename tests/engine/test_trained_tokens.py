"""Rows of some tokens that PEFT trains (`trainable_token_indices`): values and gradients against its own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from torch import Tensor

from lowtide.engine.adapters import adapters_off
from lowtide.engine.forward import install, score
from lowtide.ragged import RaggedBatch
from tests.support.models.adapted_models import build

TOKENS = [5, 9, 70]
ROWS = [[3, 5, 9, 9, 40, 5], [70, 8, 2, 95, 70]]
CONFIGS: dict[str, Any] = {
    "with LoRA": lambda: LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=TOKENS, lora_dropout=0.0),
    "alone": lambda: TrainableTokensConfig(token_indices=TOKENS, target_modules=["embed_tokens"]),
}


def made(model_type: str, tied: bool, config: str, **changes: Any) -> Any:
    model = build(model_type, torch.float64, tie_word_embeddings=tied, **changes)
    model = get_peft_model(model, CONFIGS[config](), autocast_adapter_dtype=False)
    torch.manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def dense(model: Any) -> Tensor:
    """[scores], of PEFT's own forward."""
    found = []
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        found.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0])
    return torch.cat(found)


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("model_type", ["llama", "gemma"])
def test_values_and_gradients_are_those_of_peft(model_type, tied, config):
    changes = {"pad_token_id": 9} if model_type == "llama" else {"head_dim": 16}
    model = made(model_type, tied, config, **changes)
    expected = dense(model)
    their_gradients = gradients(model, expected)
    base = dense_without(model)
    install(model)
    batch = RaggedBatch.from_segments(ROWS)
    found = score(model, batch).scored
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)  # statistics of scores are float32
    ours = gradients(model, found)
    assert ours.keys() == their_gradients.keys()
    for name, expected_gradient in their_gradients.items():
        assert expected_gradient.abs().max() > 0
        assert torch.allclose(ours[name], expected_gradient, rtol=1e-5, atol=1e-6), name
    with adapters_off(model), torch.no_grad():
        assert torch.allclose(score(model, batch).scored, base, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, base, atol=1e-2)


def dense_without(model: Any) -> Tensor:
    with model.disable_adapter(), torch.no_grad():
        return dense(model)
