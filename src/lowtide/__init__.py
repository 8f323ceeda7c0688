"""lowtide: post-training of language models at the lowest peak memory that the arithmetic allows.

The public names, and no more. They resolve when first used, so that `import lowtide` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.data.collate import DataCollatorForCompletionOnlyLM, DataCollatorWithFlattening
    from lowtide.planning import estimate, plan
    from lowtide.ragged import RaggedBatch
    from lowtide.trainers.bco import BCOConfig, BCOTrainer
    from lowtide.trainers.cpo import CPOConfig, CPOTrainer
    from lowtide.trainers.dpo import DPOConfig, DPOTrainer
    from lowtide.trainers.kto import KTOConfig, KTOTrainer
    from lowtide.trainers.orpo import ORPOConfig, ORPOTrainer
    from lowtide.trainers.reward import RewardConfig, RewardTrainer
    from lowtide.trainers.sft import SFTConfig, SFTTrainer

__version__ = "0.1.0"
__all__ = [
    "BCOConfig",
    "BCOTrainer",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorWithFlattening",
    "KTOConfig",
    "KTOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "RaggedBatch",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "estimate",
    "plan",
]

_HOME = {
    "DataCollatorForCompletionOnlyLM": "lowtide.data.collate",
    "DataCollatorWithFlattening": "lowtide.data.collate",
    "RaggedBatch": "lowtide.ragged",
    "BCOConfig": "lowtide.trainers.bco",
    "BCOTrainer": "lowtide.trainers.bco",
    "CPOConfig": "lowtide.trainers.cpo",
    "CPOTrainer": "lowtide.trainers.cpo",
    "DPOConfig": "lowtide.trainers.dpo",
    "DPOTrainer": "lowtide.trainers.dpo",
    "KTOConfig": "lowtide.trainers.kto",
    "KTOTrainer": "lowtide.trainers.kto",
    "ORPOConfig": "lowtide.trainers.orpo",
    "ORPOTrainer": "lowtide.trainers.orpo",
    "RewardConfig": "lowtide.trainers.reward",
    "RewardTrainer": "lowtide.trainers.reward",
    "SFTConfig": "lowtide.trainers.sft",
    "SFTTrainer": "lowtide.trainers.sft",
    "estimate": "lowtide.planning",
    "plan": "lowtide.planning",
}
_OF_TRL = (
    *("ModelConfig", "ScriptArguments", "DatasetMixtureConfig", "TrlParser", "RichProgressCallback"),
    *("get_dataset", "get_peft_config", "get_quantization_config", "clone_chat_template", "apply_chat_template"),
    *("extract_prompt", "maybe_extract_prompt", "unpair_preference_dataset", "maybe_unpair_preference_dataset"),
)
"""What scripts import beside trainers and configs, and goes with lowtide's as it is."""


def __getattr__(name: str) -> Any:
    if name in _OF_TRL:  # an AttributeError's text would not reach who imports the name
        raise ImportError(f"{name} stays TRL's, and goes with lowtide's trainers: `from trl import {name}`")
    if name not in _HOME:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
