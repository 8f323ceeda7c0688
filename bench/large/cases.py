"""The runs of `bench.large`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.inputs.shapes import LLAMA_8B, LLAMA_70B, QWEN3_8B
from bench.longest.cases import FULL, LEAN


@dataclass(frozen=True)
class LargeCase:
    """One run; weights that are not quantized are in bfloat16, with checkpointing."""

    shape: Mapping[str, Any]
    rows: int
    length: int
    options: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = True
    """Rank 16 on all linear layers; else all weights are trained."""
    four_bits: bool = False
    steps: int = 4


FOUR_LAYERS = {**LLAMA_70B, "num_hidden_layers": 4, "vocab_size": 32_000}
STREAMED = {"trained_weights": "stream", "optimizer_in_backward": True, "max_grad_norm": 0.0}
CASES = {
    "Llama-3.1-8B, all weights, AdamW, streamed": LargeCase(LLAMA_8B, 2, 2048, STREAMED, lora=False),
    "4 layers of a 70B, QLoRA": LargeCase(FOUR_LAYERS, 2, 2048, four_bits=True),
    "4 layers of a 70B, QLoRA, streamed": LargeCase(FOUR_LAYERS, 2, 2048, {"base_weights": "stream"}, four_bits=True),
    "Llama-3.1-8B, LoRA, a row of 32,768 tokens, offloaded and tiled": LargeCase(LLAMA_8B, 1, 32_768, LEAN, steps=2),
    "Llama-3.1-8B, all weights, 8-bit moments, a row of 32,768 tokens, offloaded and tiled": LargeCase(
        LLAMA_8B, 1, 32_768, {**FULL, **LEAN}, lora=False, steps=2
    ),
    "Qwen3-8B, LoRA, a row of 65,536 tokens in pieces": LargeCase(
        QWEN3_8B, 1, 65_536, {"tokens_per_microbatch": 16_384, "chain_storage": "host"}, steps=2
    ),
}
"""By name."""
