"""The training methods that are measured: which classes train them, who competes, and how tokens are counted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.contestants import SFT_CONTESTANTS, Contestant


@dataclass(frozen=True)
class Method:
    """One training method; `config` and `trainer` are the class names in both libraries."""

    config: str
    trainer: str
    contestants: dict[str, Contestant]
    count_tokens: Callable[[dict[str, Any]], int]
    """Real tokens of one prepared row: those that are trained on, without padding."""


METHODS = {
    "sft": Method("SFTConfig", "SFTTrainer", SFT_CONTESTANTS, count_tokens=lambda row: len(row["input_ids"])),
}
