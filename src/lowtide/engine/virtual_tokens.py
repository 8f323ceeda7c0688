"""PEFT's prompt learning: trained vectors in front of each row, which the model sees as tokens that nobody wrote.

Prompt tuning (arXiv 2104.08691) and P-tuning's prompt encoder (2103.10385) put them before the embeddings, so that the
hidden states of each row begin with theirs. Prefix tuning (2101.00190) puts them into each layer's keys and values, and
hidden states are the tokens' alone. PEFT does either for padded rows, so such a model runs padded.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lowtide.compat.peft import adapters_switched_off

EMBEDDED, IN_LAYERS = ("PROMPT_TUNING", "P_TUNING"), ("PREFIX_TUNING",)
"""Kinds whose virtual tokens have hidden states, and those whose have none."""


def kind_of_prompt(config: Any) -> str | None:
    """The kind of a PEFT configuration that puts virtual tokens before rows; None of another one."""
    if not getattr(config, "is_prompt_learning", False):
        return None
    return str(getattr(config.peft_type, "value", config.peft_type))


def prompt_config(model: nn.Module) -> Any:
    """The configuration of a model's virtual tokens; None where it has none, or where they are switched off."""
    while not hasattr(model, "peft_config") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    if not hasattr(model, "active_peft_config") or adapters_switched_off(model):
        return None
    config: Any = model.active_peft_config
    return config if kind_of_prompt(config) else None


def leading_states(model: nn.Module) -> int:
    """How many hidden states stand before those of the tokens in each row."""
    config = prompt_config(model)
    return config.num_virtual_tokens if config is not None and kind_of_prompt(config) in EMBEDDED else 0
