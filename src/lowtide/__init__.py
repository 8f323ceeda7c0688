"""lowtide: post-training of language models at the lowest peak memory that the arithmetic allows.

The public names, and no more. They resolve when first used, so that `import lowtide` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.escaping import escape_own_records
from lowtide.methods import METHODS
from lowtide.process.import_noise import drop_import_noise

if TYPE_CHECKING:
    from lowtide.data.batches.collate import DataCollatorForCompletionOnlyLM, DataCollatorWithFlattening
    from lowtide.data.sources.mixtures import DatasetConfig
    from lowtide.planning import estimate, plan
    from lowtide.ragged import RaggedBatch
    from lowtide.rollout.judges import BasePairwiseJudge, RandomPairwiseJudge
    from lowtide.rollout.rewards.published import (
        accuracy_reward,
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )
    from lowtide.scripts.arguments import DatasetMixtureConfig, ModelConfig, ScriptArguments
    from lowtide.scripts.chats import add_response_schema, prepare_multimodal_messages, supports_tool_calling
    from lowtide.scripts.collators import (
        DataCollatorForChatML,
        DataCollatorForLanguageModeling,
        DataCollatorForPreference,
        DataCollatorForUnpairedPreference,
    )
    from lowtide.scripts.datasets import (
        get_dataset,
        maybe_unpair_preference_dataset,
        pack_dataset,
        truncate_dataset,
        unpair_preference_dataset,
    )
    from lowtide.scripts.image_collators import (
        DataCollatorForVisionLanguageModeling,
        DataCollatorForVisionPreference,
        DataCollatorForVisionUnpairedPreference,
    )
    from lowtide.scripts.logs import init_zero_verbose
    from lowtide.scripts.models import (
        create_reference_model,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from lowtide.scripts.parser import TrlParser
    from lowtide.scripts.rows import (
        apply_chat_template,
        extract_prompt,
        is_conversational,
        is_conversational_from_value,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
    )
    from lowtide.scripts.templates import clone_chat_template, get_training_chat_template, setup_chat_format
    from lowtide.trainers.callbacks.bema import BEMACallback
    from lowtide.trainers.callbacks.log_completions import LogCompletionsCallback
    from lowtide.trainers.callbacks.merge_model import MergeConfig, MergeModelCallback
    from lowtide.trainers.callbacks.rich_progress import RichProgressCallback
    from lowtide.trainers.callbacks.sync_reference import SyncRefModelCallback
    from lowtide.trainers.callbacks.weave import WeaveCallback
    from lowtide.trainers.callbacks.win_rate import WinRateCallback
    from lowtide.trainers.online.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from lowtide.trainers.public import (
        A2POConfig,
        A2POTrainer,
        BCOConfig,
        BCOTrainer,
        CPOConfig,
        CPOTrainer,
        DistillationConfig,
        DistillationTrainer,
        DPOConfig,
        DPOTrainer,
        GKDConfig,
        GKDTrainer,
        GMPOConfig,
        GMPOTrainer,
        GOLDConfig,
        GOLDTrainer,
        GRPOConfig,
        GRPOTrainer,
        IWOPDConfig,
        IWOPDTrainer,
        KTOConfig,
        KTOTrainer,
        MaskedLMConfig,
        MaskedLMTrainer,
        OnlineDPOConfig,
        OnlineDPOTrainer,
        ORPOConfig,
        ORPOTrainer,
        PPOConfig,
        PPOTrainer,
        PretrainConfig,
        PretrainTrainer,
        PRMConfig,
        PRMTrainer,
        ReplacedTokenDetectionConfig,
        ReplacedTokenDetectionTrainer,
        RewardConfig,
        RewardTrainer,
        RLOOConfig,
        RLOOTrainer,
        SDFTConfig,
        SDFTTrainer,
        SDPOConfig,
        SDPOTrainer,
        Seq2SeqConfig,
        Seq2SeqTrainer,
        SequenceClassificationConfig,
        SequenceClassificationTrainer,
        SFTConfig,
        SFTTrainer,
        TokenClassificationConfig,
        TokenClassificationTrainer,
        TPOConfig,
        TPOTrainer,
    )

__version__ = "0.1.0"
__all__ = [
    "A2POConfig",
    "A2POTrainer",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "BCOConfig",
    "BCOTrainer",
    "BEMACallback",
    "BasePairwiseJudge",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DataCollatorForChatML",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorForLanguageModeling",
    "DataCollatorForPreference",
    "DataCollatorForUnpairedPreference",
    "DataCollatorForVisionLanguageModeling",
    "DataCollatorForVisionPreference",
    "DataCollatorForVisionUnpairedPreference",
    "DataCollatorWithFlattening",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "DistillationConfig",
    "DistillationTrainer",
    "GKDConfig",
    "GKDTrainer",
    "GMPOConfig",
    "GMPOTrainer",
    "GOLDConfig",
    "GOLDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "IWOPDConfig",
    "IWOPDTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "MaskedLMConfig",
    "MaskedLMTrainer",
    "MergeConfig",
    "MergeModelCallback",
    "ModelConfig",
    "ORPOConfig",
    "ORPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PRMConfig",
    "PRMTrainer",
    "PretrainConfig",
    "PretrainTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RaggedBatch",
    "RandomPairwiseJudge",
    "ReplacedTokenDetectionConfig",
    "ReplacedTokenDetectionTrainer",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "SDFTConfig",
    "SDFTTrainer",
    "SDPOConfig",
    "SDPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "Seq2SeqConfig",
    "Seq2SeqTrainer",
    "SequenceClassificationConfig",
    "SequenceClassificationTrainer",
    "SyncRefModelCallback",
    "TPOConfig",
    "TPOTrainer",
    "TokenClassificationConfig",
    "TokenClassificationTrainer",
    "TrlParser",
    "WeaveCallback",
    "WinRateCallback",
    "accuracy_reward",
    "add_response_schema",
    "apply_chat_template",
    "clone_chat_template",
    "create_reference_model",
    "estimate",
    "extract_prompt",
    "get_cosine_scaled_reward",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "get_training_chat_template",
    "init_zero_verbose",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "plan",
    "prepare_multimodal_messages",
    "reasoning_accuracy_reward",
    "setup_chat_format",
    "supports_tool_calling",
    "think_format_reward",
    "truncate_dataset",
    "unpair_preference_dataset",
]

_NAMES = {
    "lowtide.data.batches.collate": ("DataCollatorForCompletionOnlyLM", "DataCollatorWithFlattening"),
    "lowtide.data.sources.mixtures": ("DatasetConfig",),
    "lowtide.planning": ("estimate", "plan"),
    "lowtide.ragged": ("RaggedBatch",),
    "lowtide.rollout.judges": ("BasePairwiseJudge", "RandomPairwiseJudge"),
    "lowtide.rollout.rewards.published": (
        *("accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward"),
        *("get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward"),
    ),
    "lowtide.scripts.arguments": ("DatasetMixtureConfig", "ModelConfig", "ScriptArguments"),
    "lowtide.scripts.collators": (
        *("DataCollatorForChatML", "DataCollatorForLanguageModeling", "DataCollatorForPreference"),
        "DataCollatorForUnpairedPreference",
    ),
    "lowtide.scripts.datasets": (
        *("get_dataset", "maybe_unpair_preference_dataset", "pack_dataset", "truncate_dataset"),
        "unpair_preference_dataset",
    ),
    "lowtide.scripts.image_collators": (
        *("DataCollatorForVisionLanguageModeling", "DataCollatorForVisionPreference"),
        "DataCollatorForVisionUnpairedPreference",
    ),
    "lowtide.scripts.logs": ("init_zero_verbose",),
    "lowtide.scripts.models": (
        *("create_reference_model", "get_kbit_device_map", "get_peft_config", "get_quantization_config"),
    ),
    "lowtide.scripts.parser": ("TrlParser",),
    "lowtide.scripts.rows": (
        *("apply_chat_template", "extract_prompt", "is_conversational", "is_conversational_from_value"),
        *("maybe_apply_chat_template", "maybe_convert_to_chatml", "maybe_extract_prompt"),
    ),
    "lowtide.scripts.chats": ("add_response_schema", "prepare_multimodal_messages", "supports_tool_calling"),
    "lowtide.scripts.templates": ("clone_chat_template", "get_training_chat_template", "setup_chat_format"),
    "lowtide.trainers.callbacks.bema": ("BEMACallback",),
    "lowtide.trainers.callbacks.log_completions": ("LogCompletionsCallback",),
    "lowtide.trainers.callbacks.merge_model": ("MergeConfig", "MergeModelCallback"),
    "lowtide.trainers.callbacks.rich_progress": ("RichProgressCallback",),
    "lowtide.trainers.callbacks.sync_reference": ("SyncRefModelCallback",),
    "lowtide.trainers.callbacks.weave": ("WeaveCallback",),
    "lowtide.trainers.callbacks.win_rate": ("WinRateCallback",),
    "lowtide.trainers.online.async_grpo": ("AsyncGRPOConfig", "AsyncGRPOTrainer"),
}
"""The public names by the module that they are in."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_OF_METHODS = "lowtide.trainers.public"
"""Where configs and trainers are, of all methods in the table."""


drop_import_noise()
escape_own_records()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name.endswith(("Config", "Trainer")) and METHODS.public(name):
        return getattr(import_module(_OF_METHODS), name)
    if name[:1] != "_":
        elsewhere = import_module("lowtide.scripts.elsewhere").ELSEWHERE
        if name in elsewhere:  # an AttributeError's text would not reach who imports the name
            raise ImportError(f"{name} is not in lowtide: it {elsewhere[name]}")
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
