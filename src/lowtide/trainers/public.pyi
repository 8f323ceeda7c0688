# Written by `python -m bench.stubs` from the table of methods.

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from lowtide.methods.bco import BCOOptions
from lowtide.methods.cpo import CPOOptions
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.gkd import GKDOptions
from lowtide.methods.kto import KTOOptions
from lowtide.methods.masked_lm import MaskedLMOptions
from lowtide.methods.method import Method
from lowtide.methods.online.distillation import DistillationOptions
from lowtide.methods.online.gmpo import GMPOOptions
from lowtide.methods.online.grpo import GRPOOptions
from lowtide.methods.online.iw_opd import IWOPDOptions
from lowtide.methods.online.online_dpo import OnlineDPOOptions
from lowtide.methods.online.ppo import PPOOptions
from lowtide.methods.online.rloo import RLOOOptions
from lowtide.methods.online.sdft import SDFTOptions
from lowtide.methods.online.sdpo import SDPOOptions
from lowtide.methods.orpo import ORPOOptions
from lowtide.methods.pretrain import PretrainOptions
from lowtide.methods.replaced_token_detection import ReplacedTokenDetectionOptions
from lowtide.methods.reward import RewardOptions
from lowtide.methods.seq2seq import Seq2SeqOptions
from lowtide.methods.sequence_classification import SequenceClassificationOptions
from lowtide.methods.sft import SFTOptions
from lowtide.methods.token_classification import TokenClassificationOptions
from lowtide.methods.tpo import TPOOptions
from lowtide.run.options.training import TrainingConfig
from lowtide.trainers.method import MethodTrainer
from lowtide.trainers.reference import ReferenceTrainer

def trainer_class(method: Method) -> type[MethodTrainer]: ...

class Arguments(TypedDict, total=False):
    callbacks: list | None
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None
    model_init: Callable | None
    optimizer_cls_and_kwargs: tuple | None
    optimizers: tuple
    peft_config: Any
    processing_class: PreTrainedTokenizerBase | None
    quantization_config: Any
    tokenizer: PreTrainedTokenizerBase | None
    train_dataset: Dataset | IterableDataset | None

class SFTArguments(Arguments, total=False):
    compute_loss_func: Callable | None
    compute_metrics: Callable | None
    data_collator: Callable | None
    formatting_func: Callable | None
    preprocess_logits_for_metrics: Callable | None

class PretrainArguments(Arguments, total=False):
    compute_metrics: Callable | None
    data_collator: Callable | None

class GKDArguments(Arguments, total=False):
    compute_metrics: Callable | None
    data_collator: Callable | None
    formatting_func: Callable | None

class DistillationArguments(Arguments, total=False):
    environment_factory: Any
    rollout_func: Any
    tools: Any

class SDFTArguments(Arguments, total=False):
    pass

class SDPOArguments(Arguments, total=False):
    reward_processing_classes: Any

class GRPOArguments(Arguments, total=False):
    environment_factory: Any
    reward_processing_classes: Any
    rollout_func: Any
    tools: Any

class OnlineDPOArguments(Arguments, total=False):
    compute_metrics: Callable | None
    data_collator: Callable | None
    environment_factory: Any
    judge: Any
    reward_processing_classes: Any
    rollout_func: Any
    tools: Any

class PPOArguments(Arguments, total=False):
    data_collator: Callable | None
    environment_factory: Any
    reward_processing_classes: Any
    rollout_func: Any
    tools: Any
    value_model: Any

class _AsSFT(MethodTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        args: TrainingArguments | None = ...,
        **named: Unpack[SFTArguments],
    ) -> None: ...

class _AsPretrain(MethodTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        args: TrainingArguments | None = ...,
        **named: Unpack[PretrainArguments],
    ) -> None: ...

class _AsDPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        ref_model: str | os.PathLike | nn.Module | None = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[PretrainArguments],
    ) -> None: ...

class _AsGKD(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        teacher_model: str | os.PathLike | nn.Module | None = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[GKDArguments],
    ) -> None: ...

class _AsDistillation(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        teacher_model: str | os.PathLike | nn.Module | None = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[DistillationArguments],
    ) -> None: ...

class _AsSDFT(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        args: TrainingArguments | None = ...,
        **named: Unpack[SDFTArguments],
    ) -> None: ...

class _AsSDPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        reward_funcs: Any = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[SDPOArguments],
    ) -> None: ...

class _AsGRPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        reward_funcs: Any = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[GRPOArguments],
    ) -> None: ...

class _AsOnlineDPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        ref_model: str | os.PathLike | nn.Module | None = ...,
        reward_funcs: Any = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[OnlineDPOArguments],
    ) -> None: ...

class _AsPPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        ref_model: str | os.PathLike | nn.Module | None = ...,
        reward_funcs: Any = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[PPOArguments],
    ) -> None: ...

@dataclass
class SFTConfig(SFTOptions, TrainingConfig): ...

class SFTTrainer(_AsSFT): ...

@dataclass
class PretrainConfig(PretrainOptions, TrainingConfig): ...

class PretrainTrainer(_AsPretrain): ...

@dataclass
class DPOConfig(DPOOptions, TrainingConfig): ...

class DPOTrainer(_AsDPO): ...

@dataclass
class KTOConfig(KTOOptions, TrainingConfig): ...

class KTOTrainer(_AsDPO): ...

@dataclass
class RewardConfig(RewardOptions, TrainingConfig): ...

class RewardTrainer(_AsPretrain): ...

@dataclass
class TokenClassificationConfig(TokenClassificationOptions, TrainingConfig): ...

class TokenClassificationTrainer(_AsPretrain): ...

@dataclass
class SequenceClassificationConfig(SequenceClassificationOptions, TrainingConfig): ...

class SequenceClassificationTrainer(_AsPretrain): ...

@dataclass
class ORPOConfig(ORPOOptions, TrainingConfig): ...

class ORPOTrainer(_AsPretrain): ...

@dataclass
class CPOConfig(CPOOptions, TrainingConfig): ...

class CPOTrainer(_AsPretrain): ...

@dataclass
class TPOConfig(TPOOptions, TrainingConfig): ...

class TPOTrainer(_AsPretrain): ...

@dataclass
class BCOConfig(BCOOptions, TrainingConfig): ...

class BCOTrainer(_AsDPO): ...

@dataclass
class GKDConfig(GKDOptions, TrainingConfig): ...

class GKDTrainer(_AsGKD): ...

@dataclass
class DistillationConfig(DistillationOptions, TrainingConfig): ...

class DistillationTrainer(_AsDistillation): ...

@dataclass
class IWOPDConfig(IWOPDOptions, TrainingConfig): ...

class IWOPDTrainer(_AsDistillation): ...

@dataclass
class SDFTConfig(SDFTOptions, TrainingConfig): ...

class SDFTTrainer(_AsSDFT): ...

@dataclass
class SDPOConfig(SDPOOptions, TrainingConfig): ...

class SDPOTrainer(_AsSDPO): ...

@dataclass
class GRPOConfig(GRPOOptions, TrainingConfig): ...

class GRPOTrainer(_AsGRPO): ...

@dataclass
class GMPOConfig(GMPOOptions, TrainingConfig): ...

class GMPOTrainer(_AsGRPO): ...

@dataclass
class RLOOConfig(RLOOOptions, TrainingConfig): ...

class RLOOTrainer(_AsGRPO): ...

@dataclass
class OnlineDPOConfig(OnlineDPOOptions, TrainingConfig): ...

class OnlineDPOTrainer(_AsOnlineDPO): ...

@dataclass
class PPOConfig(PPOOptions, TrainingConfig): ...

class PPOTrainer(_AsPPO): ...

@dataclass
class Seq2SeqConfig(Seq2SeqOptions, TrainingConfig): ...

class Seq2SeqTrainer(_AsPretrain): ...

@dataclass
class MaskedLMConfig(MaskedLMOptions, TrainingConfig): ...

class MaskedLMTrainer(_AsPretrain): ...

@dataclass
class ReplacedTokenDetectionConfig(ReplacedTokenDetectionOptions, TrainingConfig): ...

class ReplacedTokenDetectionTrainer(_AsPretrain): ...
