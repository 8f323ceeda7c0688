"""What tells one model from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHAPES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "model_type")
"""What two models must have in common for one to take the weights of the other."""


@dataclass(frozen=True)
class Facts:
    """What vLLM says of the model that it has."""

    model: str
    max_model_length: int | None
    shapes: dict[str, Any]
    """Of the model, by the names of transformers' configs: `SHAPES`, and perhaps more."""


def shapes_of(model_config: Any) -> dict[str, Any]:
    """Those of a model of vLLM's, from its `ModelConfig`."""
    config = model_config.hf_text_config
    return {name: getattr(config, name, None) for name in SHAPES}
