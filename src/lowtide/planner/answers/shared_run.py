"""One run as a line of JSON that its owner can make public: what was predicted, what was measured, of which shapes.

Nothing private is in it, by construction: it is made of fields that are listed here, which are numbers, names of
devices, versions and options of memory. A model is named only where its shape is one that is published
(`known_models`); paths, data, texts and names of private models have no field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lowtide.planner.answers.known_models import known_config, known_models

SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts",
    "num_experts_per_tok", "tie_word_embeddings",
)  # fmt: skip
"""Of a model's config."""
OPTIONS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "tokens_per_microbatch", "max_length", "packing",
    "padding_free", "prefix_sharing", "gradient_checkpointing", "checkpointing_policy", "checkpointing_every",
    "activation_offloading", "mlp_tile_tokens", "optimizer_in_backward", "optimizer_states_on_host", "optim", "bf16",
    "fp16", "max_grad_norm", "precompute_ref_log_probs", "use_liger_kernel", "torch_compile", "rehearsal",
)  # fmt: skip
"""Of a method's config: numbers, switches, and names from lists."""


@dataclass(frozen=True)
class SharedRun:
    """What is made public of a run."""

    date: str
    versions: Mapping[str, str]
    method: str
    model: str | None
    """A published one of the same shape."""
    shape: Mapping[str, Any]
    trained: Mapping[str, Any]
    """Whether adapters are trained, of which rank, and how the rest is stored."""
    options: Mapping[str, Any]
    rows: Mapping[str, int]
    """How many a batch has, and the tokens of the longest one and of the heaviest micro-batch."""
    device: str
    device_bytes: int
    steps: int
    predicted_bytes: int
    measured_bytes: int
    phase: str
    """In which the peak is predicted to fall."""

    @property
    def error(self) -> float:
        """By which share of what was measured the prediction is above it."""
        return self.predicted_bytes / self.measured_bytes - 1

    def line(self) -> str:
        """As JSON in one line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, line: str) -> SharedRun:
        """From a line.

        Raises:
            ValueError: it is no such line, or has fields that are none of these.
        """
        found = json.loads(line)
        names = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or found.keys() != names:
            wrong = sorted(found.keys() ^ names) if isinstance(found, dict) else "no mapping"
            raise ValueError(f"a measured run has exactly the fields {', '.join(sorted(names))}; differing: {wrong}")
        for part, known in (("shape", SHAPE), ("options", OPTIONS)):
            if unknown := found[part].keys() - set(known):
                raise ValueError(f"{part} has {min(unknown)!r}, which is not made public")
        if found["model"] is not None and found["model"] not in known_models():
            raise ValueError(f"model {found['model']!r} is none that is known here: its shape alone is made public")
        return cls(**found)


def shape_of(config: Any) -> dict[str, Any]:
    """What of a model's config is made public."""
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in SHAPE}
    return {name: value for name, value in found.items() if isinstance(value, int | str | bool)}


def published_name(shape: Mapping[str, Any]) -> str | None:
    """The well-known model of a shape."""
    for name in known_models():
        known = known_config(name)
        if known is not None and shape_of(known) == shape:
            return name
    return None


def options_of(config: Any) -> dict[str, Any]:
    """What of a method's config is made public."""
    found = {name: getattr(config, name, None) for name in OPTIONS}
    values = {name: getattr(value, "value", value) for name, value in found.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str | bool)}
