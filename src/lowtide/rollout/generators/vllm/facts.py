"""What tells one model from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHAPES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "model_type")
"""What two models must have in common for one to take the weights of the other."""


@dataclass(frozen=True)
class AdapterRoom:
    """What vLLM has room for beside the base, as it was started."""

    rank: int = 0
    """The most of an adapter; 0 where it takes none."""
    count: int = 0
    """Adapters that it holds at a time."""


@dataclass(frozen=True)
class Facts:
    """What vLLM says of the model that it has."""

    model: str
    max_model_length: int | None
    shapes: dict[str, Any]
    """Of the model, by the names of transformers' configs: `SHAPES`, and perhaps more."""
    dtype: str | None = None
    """That it computes in, such as "bfloat16"."""
    adapters: AdapterRoom = AdapterRoom()


def dtype_of(model_config: Any) -> str:
    """That in which a model of vLLM's computes, from its `ModelConfig`."""
    return str(model_config.dtype).removeprefix("torch.")


def adapter_room(vllm_config: Any) -> AdapterRoom:
    """What vLLM has room for, from its `VllmConfig`."""
    lora = vllm_config.lora_config
    return AdapterRoom() if lora is None else AdapterRoom(lora.max_lora_rank, lora.max_loras)


def shapes_of(model_config: Any) -> dict[str, Any]:
    """Those of a model of vLLM's, from its `ModelConfig`."""
    config = model_config.hf_text_config
    return {name: getattr(config, name, None) for name in SHAPES}
