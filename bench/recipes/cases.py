"""The recipes, and what each is predicted for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.inputs.shapes import LLAMA_8B, QWEN3_8B, QWEN_05B

GIB = 1 << 30
LONG = 1_000_000


@dataclass(frozen=True)
class Recipe:
    """A run file, and what it is predicted for."""

    title: str
    method: str
    config: Mapping[str, Any]
    """Of its model."""
    memory_gib: float
    """What a process may take of each device."""
    lengths: Sequence[int | Sequence[int]]
    """Of the rows of a step in tokens, as `lowtide.estimate` takes them: the longest that the run file lets through."""
    device: str = "cpu"
    devices: int = 1


RECIPES_BY_FILE: Mapping[str, Recipe] = {
    "qwen-8gb": Recipe("Qwen2.5-0.5B, all weights, on 8 GB", "sft", QWEN_05B, 7.6, [1024] * 16, device="RTX-4090"),
    "llama-8b-qlora-24gb": Recipe("Llama-3-8B, QLoRA, on 24 GB", "sft", LLAMA_8B, 23.6, [8192] * 16, device="RTX-4090"),
    "dpo-laptop": Recipe("DPO on a laptop with 16 GB", "dpo", QWEN_05B, 12, [(512, 512, 512)] * 8),
    "grpo-gsm8k": Recipe("GRPO on GSM8K, on 24 GB", "grpo", QWEN_05B, 23.6, [200] * 8, device="RTX-4090"),
    "llama-8b-8-gpus": Recipe(
        "Llama-3.1-8B, all weights, on 8 GPUs", "sft", LLAMA_8B, 79.1, [8192] * 4, device="H100-80GB", devices=8
    ),
    "million-tokens": Recipe(
        "Rows of a million tokens, on 8 GPUs",
        "sft",
        QWEN3_8B | {"max_position_embeddings": LONG},
        79.1,
        [LONG],
        device="H100-80GB",
        devices=8,
    ),
}
"""By the name of the run file. A GPU of 8 GB is predicted as an RTX 4090, which has the same context; 7.6 GiB are what
torch says such a card has. A laptop's 16 GB are shared with its system and a browser."""
