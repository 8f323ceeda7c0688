"""Who trains what in `bench.side_by_side`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.inputs.shapes import LLAMA_8B, QWEN_05B, QWEN_7B, QWEN_15B

RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LONGEST, MEDIAN, SPREAD = 2048, 350, 0.9
"""Of the rows of unequal lengths, in tokens; the spread is of the logarithm."""
EQUAL = 1024
UNEQUAL_STEPS, EQUAL_STEPS, WARM = 7, 5, 3
"""Steps of either kind, of which the first so many are not counted (of the equal ones the first alone)."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained: in bfloat16, with checkpointing."""

    shape: Mapping[str, Any]
    rows: int = 16
    adapters: bool = True
    """Rank 16 on all linear layers; else all weights are trained."""
    four_bits: bool = False


CASES = {
    "llama-8b-lora": Case(LLAMA_8B),
    "llama-8b-qlora": Case(LLAMA_8B, rows=4, four_bits=True),
    "qwen-0.5b-lora": Case(QWEN_05B),
    "qwen-0.5b-full": Case(QWEN_05B, adapters=False),
    "qwen-1.5b-full": Case(QWEN_15B, rows=8, adapters=False),
    "qwen-7b-full": Case(QWEN_7B, rows=4, adapters=False),
}
"""The three that train all weights are those whose speed on an H100 LLMQ publishes, in rows of 1,024 tokens: 149,000
tokens/s for the 0.5B, 59,000 for the 1.5B, 14,000 for the 7B (https://github.com/IST-DASLab/llmq)."""


@dataclass(frozen=True)
class Contestant:
    """A library with one set of flags."""

    package: str
    flags: Mapping[str, Any] = field(default_factory=dict)


FUSED = {"fused_layers": True}
CONTESTANTS = {
    "lowtide": Contestant("lowtide", FUSED),
    "lowtide-stock": Contestant("lowtide", {"fused_layers": False}),
    "lowtide-offloading": Contestant("lowtide", {**FUSED, "activation_offloading": True}),
    "lowtide-kept": Contestant("lowtide", {**FUSED, "gradient_checkpointing": False}),
    "lowtide-auto": Contestant("lowtide", {**FUSED, "memory_budget": "auto"}),
    "trl-liger": Contestant("trl", {"use_liger_kernel": True}),
    "trl-liger-padding-free": Contestant("trl", {"use_liger_kernel": True, "padding_free": True, "max_length": None}),
    "unsloth": Contestant("unsloth"),
    "unsloth-packing": Contestant("unsloth", {"packing": True}),
}
