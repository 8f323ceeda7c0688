"""Tiny models of the families whose layers can be fused, and a step of them."""

from __future__ import annotations

import torch

from tests.support.models.architectures import RAGGED, RECURRENT
from tests.support.models.tiny_models import build, gradients, loss_of, with_adapters

FAMILIES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 5},
    "ministral": {"sliding_window": 5},
    "olmo2": {},
    "olmo3": {"sliding_window": 5},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5},
}
"""Families of which attention and norms can be."""
DENSE = ("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "olmo_hybrid", "qwen3_5")
"""Families with recurrent layers or short convolutions whose MLPs are known."""
SPARSE = (
    "granitemoehybrid with experts",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_moe",
    "qwen3_next",
)
"""Those whose MLPs are mixtures in some of the layers, or in all."""
HYBRIDS = (*DENSE, *SPARSE)
WAYS = ["full", "LoRA", "LoRA with dropout"]


TAKEN = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of Falcon-H1 and Nemotron-H but for out_proj, which PEFT refuses."""


def family(kind: str, **changes: object):
    name = kind.split()[0]
    if kind not in HYBRIDS:
        return build(name, **{**(FAMILIES | MIXTURES)[kind], **changes})
    model_type, settings = (RAGGED | RECURRENT)[name]
    experts = {"num_local_experts": 0} if kind == "granitemoehybrid" else {}
    # Of larger weights the last digits of a router, or of a decay, show what comes before it.
    return build(model_type, **{"initializer_range": 0.1, **settings, **experts, **changes})


def adapted(model, way: str):
    if way == "full":
        return model
    changes = {"target_modules": TAKEN} if model.config.model_type in ("falcon_h1", "nemotron_h") else {}
    return with_adapters(model, lora_alpha=8, lora_dropout=0.3 if "dropout" in way else 0.0, **changes)


def run(model, batch):
    torch.manual_seed(3)
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), gradients(model)
