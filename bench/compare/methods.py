"""The training methods that are measured: which classes train them, who competes, and how tokens are counted.

Real tokens are those of the rows, with the prompt once for each completion, also where a library computes it once for
all: both libraries are credited with the same work for the same rows. What a method computes beside that (a
reference's forward, KTO's mismatched completions) is part of the time and not of the tokens, again for both.

Where a method compares the policy with a reference, lowtide's trainer makes its frozen copy by itself. TRL's can only
load one by the model's name, and these models have none, so it is given a copy, made after the meter has started: in
both libraries the reference is part of the peak. A teacher is given to both, of the student's shape with twice the
layers, and made after the meter has started.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.compare.contestants import (
    COMMON,
    DPO_CONTESTANTS,
    GKD_CONTESTANTS,
    LORA_CONTESTANTS,
    SFT_CONTESTANTS,
    Contestant,
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One training method; `config` and `trainer` are the class names in both libraries."""

    title: str
    config: str
    trainer: str
    contestants: dict[str, Contestant]
    count_tokens: Callable[[Row], int]
    """Real tokens of one prepared row: those that are trained on, without padding."""
    reference: bool = False
    """Whether the policy is compared with a copy of itself."""
    rewards: bool = False
    """Whether the model gives one value a row, in place of logits."""
    teacher: bool = False
    """Whether the model learns from another one."""
    adapters: bool = False
    """Whether LoRA adapters of all linear layers are trained."""


def tokens_of_text(row: Row) -> int:
    return len(row["input_ids"])


def tokens_of_pair(row: Row) -> int:
    """Both sides whole; where sides hold their prompt, as TRL's of a reward model, there is no `prompt_ids`."""
    return 2 * len(row.get("prompt_ids", ())) + len(row["chosen_ids"]) + len(row["rejected_ids"])


def tokens_of_completion(row: Row) -> int:
    return len(row["prompt_ids"]) + len(row["completion_ids"])


METHODS = {
    "sft": Method("SFT", "SFTConfig", "SFTTrainer", SFT_CONTESTANTS, tokens_of_text),
    "sft-lora": Method("SFT with LoRA", "SFTConfig", "SFTTrainer", LORA_CONTESTANTS, tokens_of_text, adapters=True),
    "dpo": Method("DPO", "DPOConfig", "DPOTrainer", DPO_CONTESTANTS, tokens_of_pair, reference=True),
    "gkd": Method("GKD", "GKDConfig", "GKDTrainer", GKD_CONTESTANTS, tokens_of_text, teacher=True),
    "kto": Method("KTO", "KTOConfig", "KTOTrainer", COMMON, tokens_of_completion, reference=True),
    "reward": Method("Reward model", "RewardConfig", "RewardTrainer", COMMON, tokens_of_pair, rewards=True),
}
