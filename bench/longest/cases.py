"""The rows of `bench.longest`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.inputs.shapes import LLAMA_8B

POSITIONS = 1 << 24
LEAN = {"activation_offloading": True, "mlp_tile_tokens": 8192}
FULL = {"optimizer_in_backward": True, "max_grad_norm": 0.0, "optim": "adamw_stochastic_8bit"}


@dataclass(frozen=True)
class LongCase:
    """One row of the table; weights are in bfloat16."""

    options: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = True
    """Rank 16 on all linear layers; else all weights are trained."""


CASES = {
    "LoRA, no checkpointing": LongCase({"gradient_checkpointing": False}),
    "LoRA, offloading, no checkpointing": LongCase({"gradient_checkpointing": False, "activation_offloading": True}),
    "LoRA, checkpointing that keeps attention": LongCase({"checkpointing_policy": "attention"}),
    "LoRA, checkpointing": LongCase(),
    "LoRA, checkpointing and offloading": LongCase({"activation_offloading": True}),
    "LoRA, checkpointing and tiled MLPs": LongCase({"mlp_tile_tokens": 8192}),
    "LoRA, checkpointing, offloading and tiled MLPs": LongCase(LEAN),
    "all weights, 8-bit moments, in backward, checkpointing": LongCase(FULL, lora=False),
    "all weights, 8-bit moments, in backward, checkpointing, offloading and tiled MLPs": LongCase(
        {**FULL, **LEAN}, lora=False
    ),
}
"""By name."""


@dataclass(frozen=True)
class PiecesCase:
    """One line of the table of rows in pieces, with the shape of Qwen3-8B; weights are in bfloat16."""

    options: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = True
    """As in `LongCase`."""
    four_bits: bool = False


PIECE = 131_072
"""Tokens of a piece, whose keys wait in host memory."""
PIECES: Mapping[str, PiecesCase] = {
    "in pieces, LoRA": PiecesCase(),
    "in pieces, QLoRA": PiecesCase(four_bits=True),
    "in pieces, all weights, states of AdamW on the host": PiecesCase({"optimizer_states_on_host": True}, lora=False),
}
"""By name; predicted alone."""


def flags(case: LongCase, length: int) -> dict[str, Any]:
    """What a row's trainer is given, here and in an estimate."""
    return {"per_device_train_batch_size": 1, "max_length": length, "gradient_checkpointing": True, **case.options}


def shape(layers: int) -> dict[str, Any]:
    """The model's config, with so many layers and with positions for any row."""
    return LLAMA_8B | {"num_hidden_layers": layers, "max_position_embeddings": POSITIONS}
