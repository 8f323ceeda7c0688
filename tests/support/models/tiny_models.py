"""Tiny models and batches for the tests of memory techniques, and what they are trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowtide.engine.forward import causal_model, install, score
from lowtide.memory.activations.checkpointing import set_checkpointing
from lowtide.ragged import RaggedBatch

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def build(model_type: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """A model with large initial weights, so that nothing is near its linear range."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, "initializer_range": 0.2, **changes})
    model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).train()


def with_adapters(model: PreTrainedModel, **options: object) -> nn.Module:
    """Low-rank adapters, on all linear layers unless said otherwise, none of them zero."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def tokens(length: int, seed: int = 1) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def separate() -> RaggedBatch:
    return RaggedBatch.from_segments([tokens(length, length) for length in (13, 2, 9, 17)])


def shared() -> RaggedBatch:
    """Two prompts with completions that share them."""
    lengths = (11, 4, 9, 5, 6, 3)
    segments = [tokens(length, length) for length in lengths]
    return RaggedBatch.from_segments(segments, prefix=[-1, 0, 0, -1, 3, 3], row=[0, 0, 0, 1, 1, 1])


def loss_of(model: nn.Module, batch: RaggedBatch, accumulate: bool = False) -> Tensor:
    """The mean negative log-likelihood through the fused head; `model` is prepared by `engine.forward.install`."""
    return -score(model, batch, accumulate=accumulate).scored.mean()


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    install(model)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those that there are, by parameter; the model has none afterwards."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal to the last bit."""
    assert wanted
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Each within so much of its own norm (of a hundredth of the largest norm, where that is more)."""
    assert wanted
    assert got.keys() == wanted.keys()
    floor = max(float(each.norm()) for each in wanted.values()) / 100
    errors = {n: float((got[n] - each).norm()) / max(float(each.norm()), floor) for n, each in wanted.items()}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def checkpointed(model, policy="full", every=1, kwargs=None):
    causal_model(model).gradient_checkpointing_enable(kwargs)
    set_checkpointing(model, policy, every, kwargs)
    return model
