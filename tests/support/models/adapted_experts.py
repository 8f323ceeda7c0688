"""Mixtures whose routed experts have adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lowtide.ops.layers.stacks import plain_stacks, shapes_of_stacks
from tests.support.models.causal_families import tiny_causal

STACKS = {
    "qwen3_moe": ["experts.gate_up_proj", "experts.down_proj"],
    "gpt_oss": ["experts.gate_up_proj", "experts.down_proj"],  # [experts, in, out], biases, gates between
    "nemotron_h": ["experts.up_proj", "experts.down_proj"],  # no gates
}


def adapted_experts(
    kind: str,
    rank: int = 3,
    dtype: torch.dtype = torch.float32,
    stacks: list[str] | None = None,
    store: Callable[..., None] | None = None,
) -> Any:
    """A tiny mixture with adapters of experts that are not 0.

    Args:
        store: quantizes a stack of experts.
    """
    torch.manual_seed(0)
    model: Any = tiny_causal(kind).to(dtype)
    for experts, name in plain_stacks(model) if store else ():
        store(experts, name, torch.device("cpu"))
    with shapes_of_stacks(model):
        config = LoraConfig(r=rank, target_modules=["q_proj"], target_parameters=stacks or STACKS[kind])
        model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.3)
    return model
