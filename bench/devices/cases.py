"""What `bench.devices` plans: models, devices, and the settings of the long rows."""

from collections.abc import Mapping
from typing import Any

from bench.inputs.shapes import LLAMA_7B, LLAMA_70B, LLAMA_405B

DEVICE, PER_NODE = "H100-80GB", 8
MODELS: Mapping[str, dict[str, Any]] = {"7B": LLAMA_7B, "70B": LLAMA_70B, "405B": LLAMA_405B}
LENGTH, ROWS = 4096, 4
"""Of a row in tokens, and rows of a step for each device."""
ROW = 1_000_000
TRL_GB, TRL_TOKENS, TRL_SECONDS = 56.2, 1_048_576, 380
TRL_SOURCE = "https://huggingface.co/docs/trl/en/long_context_training"
"""Measured by TRL's authors on 8 H100, in the release notes of TRL 1.13 too."""
WEIGHTS = ("float32", "bfloat16")
"""As they are stored; computed is in bfloat16 in any case."""
MOST_GB = {ROW: TRL_GB, 2 * ROW: 70.0}
"""Tokens of the long rows, and what each is to take of a device at most."""
IN_PIECES = {"tokens_per_microbatch": 262_144, "chain_storage": "host"}
"""Of a row above `ROW`: each piece is split over the ranks."""
ROW_SHARDING = "sp8+fsdp2"
ROW_OPTIONS = {
    "per_device_train_batch_size": 1,
    "max_length": ROW,
    "bf16": True,
    "gradient_checkpointing": True,
    "activation_offloading": True,
    "mlp_tile_tokens": 8192,
}
