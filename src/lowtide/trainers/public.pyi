# Written by `python -m bench.stubs` from the table of methods.

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from datasets import Dataset, IterableDataset
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowtide.methods.bco import BCOOptions
from lowtide.methods.cpo import CPOOptions
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.kto import KTOOptions
from lowtide.methods.masked_lm import MaskedLMOptions
from lowtide.methods.method import Method
from lowtide.methods.online.a2po import A2POOptions
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
from lowtide.methods.process.prm import PRMOptions
from lowtide.methods.replaced_token_detection import ReplacedTokenDetectionOptions
from lowtide.methods.reward import RewardOptions
from lowtide.methods.seq2seq import Seq2SeqOptions
from lowtide.methods.sequence_classification import SequenceClassificationOptions
from lowtide.methods.sft import SFTOptions
from lowtide.methods.taught.gkd import GKDOptions
from lowtide.methods.taught.gold import GOLDOptions
from lowtide.methods.token_classification import TokenClassificationOptions
from lowtide.methods.tpo import TPOOptions
from lowtide.rollout.judges import BasePairwiseJudge
from lowtide.run.options.training import TrainingConfig
from lowtide.trainers.method import MethodTrainer
from lowtide.trainers.reference import ReferenceTrainer

Rewarding = str | nn.Module | Callable[..., Any]

def trainer_class(method: Method) -> type[MethodTrainer]: ...

@dataclass(kw_only=True)
class _Config(TrainingConfig):
    lr_scheduler_type: (
        Literal[
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "constant",
            "constant_with_warmup",
            "inverse_sqrt",
            "reduce_lr_on_plateau",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
            "greedy",
        ]
        | SchedulerType
    ) = ...
    optim: (
        Literal[
            "adamw_compressed",
            "adamw_stochastic",
            "adamw_stochastic_8bit",
            "adamw_flash",
            "muon",
            "adamw_lora_fa",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_torch_xla",
            "adamw_torch_npu_fused",
            "adafactor",
            "adamw_anyprecision",
            "adamw_torch_4bit",
            "adamw_torch_8bit",
            "ademamix",
            "sgd",
            "adagrad",
            "adamw_bnb_8bit",
            "adamw_8bit",
            "ademamix_8bit",
            "lion_8bit",
            "lion_32bit",
            "paged_adamw_32bit",
            "paged_adamw_8bit",
            "paged_ademamix_32bit",
            "paged_ademamix_8bit",
            "paged_lion_32bit",
            "paged_lion_8bit",
            "rmsprop",
            "rmsprop_bnb",
            "rmsprop_bnb_8bit",
            "rmsprop_bnb_32bit",
            "galore_adamw",
            "galore_adamw_8bit",
            "galore_adafactor",
            "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise",
            "galore_adafactor_layerwise",
            "lomo",
            "adalomo",
            "grokadamw",
            "schedule_free_radam",
            "schedule_free_adamw",
            "schedule_free_sgd",
            "apollo_adamw",
            "apollo_adamw_layerwise",
            "stable_adamw",
        ]
        | OptimizerNames
    ) = ...
    logging_strategy: Literal["no", "steps", "epoch"] | IntervalStrategy = ...
    log_level: Literal["detail", "debug", "info", "warning", "error", "critical", "passive"] = ...
    log_level_replica: Literal["detail", "debug", "info", "warning", "error", "critical", "passive"] = ...
    eval_strategy: Literal["no", "steps", "epoch"] | IntervalStrategy = ...
    save_strategy: Literal["no", "steps", "epoch", "best"] | SaveStrategy = ...
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] | HubStrategy = ...
    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = ...
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = ...
    ddp_backend: Literal["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"] | None = ...
    checkpointing_policy: Literal["full", "attention", "matmul"] = ...
    chain_storage: Literal["device", "host"] = ...
    base_weights: Literal["resident", "stream"] = ...
    base_dtype: Literal["float8", "nvfp4"] | None = ...
    trained_weights: Literal["resident", "stream"] = ...

class Arguments(TypedDict, total=False):
    callbacks: list | None
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None
    model_init: Callable | None
    optimizer_cls_and_kwargs: tuple | None
    optimizers: tuple
    peft_config: PeftConfig | None
    processing_class: PreTrainedTokenizerBase | None
    quantization_config: QuantizationConfigMixin | dict | None
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
    environment_factory: Callable | None
    rollout_func: Callable | None
    tools: list[Callable] | None

class SDFTArguments(Arguments, total=False):
    pass

class SDPOArguments(Arguments, total=False):
    reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None

class GRPOArguments(Arguments, total=False):
    environment_factory: Callable | None
    reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None
    rollout_func: Callable | None
    tools: list[Callable] | None

class OnlineDPOArguments(Arguments, total=False):
    compute_metrics: Callable | None
    data_collator: Callable | None
    environment_factory: Callable | None
    judge: BasePairwiseJudge | None
    reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None
    rollout_func: Callable | None
    tools: list[Callable] | None

class PPOArguments(Arguments, total=False):
    data_collator: Callable | None
    environment_factory: Callable | None
    reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None
    rollout_func: Callable | None
    tools: list[Callable] | None
    value_model: str | os.PathLike | nn.Module | None

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
        reward_funcs: Rewarding | list[Rewarding] | None = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[SDPOArguments],
    ) -> None: ...

class _AsGRPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        reward_funcs: Rewarding | list[Rewarding] | None = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[GRPOArguments],
    ) -> None: ...

class _AsOnlineDPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        ref_model: str | os.PathLike | nn.Module | None = ...,
        reward_funcs: Rewarding | list[Rewarding] | None = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[OnlineDPOArguments],
    ) -> None: ...

class _AsPPO(ReferenceTrainer):
    def __init__(
        self,
        model: str | os.PathLike | nn.Module,
        ref_model: str | os.PathLike | nn.Module | None = ...,
        reward_funcs: Rewarding | list[Rewarding] | None = ...,
        args: TrainingArguments | None = ...,
        **named: Unpack[PPOArguments],
    ) -> None: ...

@dataclass(kw_only=True)
class SFTConfig(SFTOptions, _Config):
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = ...

class SFTTrainer(_AsSFT): ...

@dataclass(kw_only=True)
class PretrainConfig(PretrainOptions, _Config):
    lr_scheduler_type: (
        Literal[
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "constant",
            "constant_with_warmup",
            "inverse_sqrt",
            "reduce_lr_on_plateau",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
            "greedy",
        ]
        | SchedulerType
    ) = ...
    packing_strategy: Literal["wrapped", "bfd_split", "bfd"] = ...

class PretrainTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class DPOConfig(DPOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = ...

class DPOTrainer(_AsDPO): ...

@dataclass(kw_only=True)
class KTOConfig(KTOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...

class KTOTrainer(_AsDPO): ...

@dataclass(kw_only=True)
class RewardConfig(RewardOptions, _Config):
    turns: Literal["as_generated", "whole"] = ...

class RewardTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class PRMConfig(PRMOptions, _Config): ...

class PRMTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class TokenClassificationConfig(TokenClassificationOptions, _Config):
    long_rows: Literal["windows", "cut"] = ...

class TokenClassificationTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class SequenceClassificationConfig(SequenceClassificationOptions, _Config):
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = ...

class SequenceClassificationTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class ORPOConfig(ORPOOptions, _Config):
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...

class ORPOTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class CPOConfig(CPOOptions, _Config):
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...

class CPOTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class TPOConfig(TPOOptions, _Config):
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...

class TPOTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class BCOConfig(BCOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...

class BCOTrainer(_AsDPO): ...

@dataclass(kw_only=True)
class GKDConfig(GKDOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    reverse_kl_top_1_mode: Literal["sampled"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = ...

class GKDTrainer(_AsGKD): ...

@dataclass(kw_only=True)
class GOLDConfig(GOLDOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    reverse_kl_top_1_mode: Literal["sampled"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    turns: Literal["as_generated", "whole"] = ...
    truncation_mode: Literal["keep_start", "keep_end"] = ...
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = ...
    uld_token_merge_strategy: Literal["bayesian", "observed"] = ...

class GOLDTrainer(_AsGKD): ...

@dataclass(kw_only=True)
class DistillationConfig(DistillationOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    reverse_kl_top_1_mode: Literal["sampled"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...

class DistillationTrainer(_AsDistillation): ...

@dataclass(kw_only=True)
class IWOPDConfig(IWOPDOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...
    distillation_objective: Literal["iw_opd"] = ...

class IWOPDTrainer(_AsDistillation): ...

@dataclass(kw_only=True)
class SDFTConfig(SDFTOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...
    teacher_model_kind: Literal["base", "live", "ema"] = ...
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = ...

class SDFTTrainer(_AsSDFT): ...

@dataclass(kw_only=True)
class SDPOConfig(SDPOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...
    teacher_model_kind: Literal["base", "live", "ema"] = ...
    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = ...
    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = ...
    importance_sampling_level: Literal["token", "sequence"] = ...

class SDPOTrainer(_AsSDPO): ...

@dataclass(kw_only=True)
class GRPOConfig(GRPOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...
    importance_sampling_level: Literal["token", "sequence"] = ...
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = ...
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = ...

class GRPOTrainer(_AsGRPO): ...

@dataclass(kw_only=True)
class GMPOConfig(GMPOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...
    loss_type: Literal["gmpo"] = ...
    importance_sampling_level: Literal["token", "sequence"] = ...
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = ...
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = ...

class GMPOTrainer(_AsGRPO): ...

@dataclass(kw_only=True)
class A2POConfig(A2POOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...

class A2POTrainer(_AsGRPO): ...

@dataclass(kw_only=True)
class RLOOConfig(RLOOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...

class RLOOTrainer(_AsGRPO): ...

@dataclass(kw_only=True)
class OnlineDPOConfig(OnlineDPOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...
    loss_type: Literal["sigmoid", "ipo"] = ...

class OnlineDPOTrainer(_AsOnlineDPO): ...

@dataclass(kw_only=True)
class PPOConfig(PPOOptions, _Config):
    ref_model_storage: Literal["same", "8bit", "4bit", "cpu"] = ...
    generation_backend: Literal["auto", "lowtide", "transformers"] = ...
    vllm_mode: Literal["colocate", "server"] = ...
    vllm_model_impl: Literal["vllm", "transformers"] = ...
    kl_estimator: Literal["k1", "k3"] = ...
    stop_token: Literal["eos"] | None = ...

class PPOTrainer(_AsPPO): ...

@dataclass(kw_only=True)
class Seq2SeqConfig(Seq2SeqOptions, _Config): ...

class Seq2SeqTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class MaskedLMConfig(MaskedLMOptions, _Config):
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = ...
    masking: Literal["tokens", "spans", "ngrams"] = ...

class MaskedLMTrainer(_AsPretrain): ...

@dataclass(kw_only=True)
class ReplacedTokenDetectionConfig(ReplacedTokenDetectionOptions, _Config):
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = ...
    masking: Literal["tokens", "spans", "ngrams"] = ...

class ReplacedTokenDetectionTrainer(_AsPretrain): ...
