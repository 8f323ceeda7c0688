"""A plan in the settings of another trainer, and which of its savings that trainer lacks.

Option names are those of TRL 1.16 (`SFTConfig`, `DPOConfig`, `ModelConfig`), of Axolotl's `utils/schemas` and
LLaMA-Factory's `hparams` in November 2026, and of Unsloth's `FastLanguageModel`. What a trainer has no word for is left
out and named in a comment, so that nobody takes the predicted peak for that trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.answers.unsloth_script import unsloth_script
from lowtide.planner.plan import Plan

BATCH, STEPS, LENGTH = "per_device_train_batch_size", "gradient_accumulation_steps", "max_length"
OURS = {
    "tokens_per_microbatch": "micro-batches are counted in rows, so a few long rows take more than predicted",
    "chain_storage": "rows are not run in pieces",
    "optimizer_in_backward": "gradients of all weights are there at once",
    "optimizer_states_on_host": "the optimizer's states stay on the device",
    "checkpointing_every": "layers are checkpointed all or none",
    "ref_model_storage": "the reference stays in the precision of the policy",
    "mlp_tile_tokens": "an MLP sees all tokens of a micro-batch at once",
}
"""Options that no other trainer has, or none by default, with what follows."""
PAIRED = ("dpo", "orpo", "cpo", "kto", "bco", "reward")
STOCHASTIC = ("adamw_compressed", "adamw_stochastic", "adamw_stochastic_8bit")


@dataclass(frozen=True)
class Settings:
    """Of another trainer."""

    values: dict[str, Any]
    lacks: dict[str, str]
    """By our option, what follows from its lack."""


@dataclass(frozen=True)
class Trainer:
    """Another trainer."""

    title: str
    methods: Mapping[str, Mapping[str, Any]]
    """By our method, what says so there."""
    command: str
    """That runs the file."""
    translate: Callable[[dict[str, Any], str], Settings]
    always_lacks: Mapping[str, str] = field(default_factory=dict)


def settings_for(other: str, plan: Plan) -> str:
    """A plan as a file of another trainer: YAML, or a script for Unsloth.

    Raises:
        ValueError: the trainer has no such method.
    """
    trainer = TRAINERS[other]
    if plan.method not in trainer.methods:
        raise ValueError(
            f"--for {other}: {trainer.title} has no {plan.method}; it has {', '.join(trainer.methods)}. Leave --for out"
        )
    given = {**plan.requested, **plan.settings}
    found = trainer.translate(_in_rows(given), plan.method)
    lacks = {**_lacking(given, found), **trainer.always_lacks}
    if plan.method not in PAIRED:
        lacks.pop("prefix_sharing", None)
    head = [
        f"{trainer.title}, {plan.method}; from a plan of lowtide for {bytes_text(plan.budget_bytes)} on {plan.device}.",
        f"lowtide's predicted peak is {bytes_text(plan.chosen.peak_bytes)}. {trainer.title} was not measured: without",
        "what it lacks, below, it takes more.",
        *(f"- {name}: {why}" for name, why in lacks.items()),
        f"Run it: {trainer.command}",
    ]
    comments = "".join(f"# {line}\n" for line in head)
    if other == "unsloth":
        return comments + unsloth_script(found.values, plan.method)
    values = {**trainer.methods[plan.method], **found.values}
    return comments + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _in_rows(given: Mapping[str, Any]) -> dict[str, Any]:
    """With a token budget as rows of a micro-batch, and as many micro-batches as make the same batch."""
    values = dict(given)
    tokens = values.get("tokens_per_microbatch")
    if not tokens:
        return values
    batch = values.get(BATCH, 8) * values.get(STEPS, 1)
    rows = max(1, min(values.get(BATCH, 8), int(tokens) // (values.get(LENGTH) or 1024)))
    return {**values, BATCH: rows, STEPS: math.ceil(batch / rows)}


def _lacking(given: Mapping[str, Any], found: Settings) -> dict[str, str]:
    """What the plan sets and the other trainer has no word for."""
    idle = {"checkpointing_every": 1, "optimizer_in_backward": False, "mlp_tile_tokens": None}
    used = {name: why for name, why in OURS.items() if given.get(name, idle.get(name)) not in (idle.get(name), False)}
    used = {name: why for name, why in used.items() if name not in found.lacks or found.lacks[name]}
    if given.get("optim") in STOCHASTIC:
        used["optim"] = f"{given['optim']} is lowtide's: AdamW with float32 states stands in its place"
    return {name: why for name, why in {**used, **found.lacks}.items() if why}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {there: values[here] for here, there in names.items() if values.get(here) is not None}


COMMON = ("output_dir", "learning_rate", "num_train_epochs", "max_steps", "seed", BATCH, STEPS, "warmup_steps",
          "lr_scheduler_type", "weight_decay", "max_grad_norm", "bf16", "fp16")  # fmt: skip


def _trl(values: dict[str, Any], method: str) -> Settings:
    same = [*COMMON, LENGTH, "gradient_checkpointing", "beta", "loss_type", "label_smoothing", "use_peft", "lora_r"]
    same += ["lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit", "dtype", "packing"]
    names = {"model": "model_name_or_path", "dataset": "dataset_name"} | {name: name for name in same}
    found = _renamed(values, names)
    found |= _optimizer(values, "optim", str)
    lacks = {}
    if method in ("sft", "dpo"):
        found["padding_free"] = True
    else:
        lacks["padding_free"] = "rows of a micro-batch are padded to the longest"
    if method in ("sft", "dpo", "kto", "reward"):
        found |= _renamed(values, {"activation_offloading": "activation_offloading"})
    elif values.get("activation_offloading"):
        lacks["activation_offloading"] = "TRL has it for SFT, DPO, KTO and reward models"
    found |= _renamed(values, {"precompute_ref_log_probs": "precompute_ref_log_probs"}) if method == "dpo" else {}
    if values.get("checkpointing_policy", "full") != "full":
        lacks["checkpointing_policy"] = "a checkpointed layer keeps nothing"
    return Settings(found, lacks)


def _axolotl(values: dict[str, Any], method: str) -> Settings:
    names = {"model": "base_model", LENGTH: "sequence_len", BATCH: "micro_batch_size", STEPS: STEPS}
    names |= {"num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler", "beta": "rl_beta"}
    alike = {*COMMON, "gradient_checkpointing", "activation_offloading"} - names.keys()
    names |= {name: name for name in sorted(alike)}
    found = _renamed(values, names) | _optimizer(values, "optimizer", _AXOLOTL_OPTIMIZERS.get)
    found["datasets"] = [{"path": values.get("dataset", "DATASET"), "type": "chat_template"}]
    if values.get("use_peft"):
        found |= {"adapter": "qlora" if values.get("load_in_4bit") else "lora"} | _renamed(
            values, {"load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit"}
        )
        found |= {"lora_r": values.get("lora_r", 16), "lora_alpha": values.get("lora_alpha", 32)}
        found |= {"lora_dropout": values.get("lora_dropout", 0.05), "lora_target_linear": True}
    lacks = {}
    if values.get("mlp_tile_tokens"):
        found["tiled_mlp"], lacks["mlp_tile_tokens"] = True, ""
    if (policy := values.get("checkpointing_policy", "full")) == "attention":
        found["selective_checkpointing"] = True
    elif policy != "full":
        lacks["checkpointing_policy"] = "a checkpointed layer keeps attention at most"
    return Settings(found, lacks)


def _llama_factory(values: dict[str, Any], method: str) -> Settings:
    names = {"model": "model_name_or_path", "dataset": "dataset", LENGTH: "cutoff_len", "beta": "pref_beta"}
    found = {"do_train": True, **_renamed(values, names | {name: name for name in COMMON})}
    found |= {"template": "TEMPLATE"} | _optimizer(values, "optim", str)
    found["finetuning_type"] = "lora" if values.get("use_peft") else "full"
    if values.get("use_peft"):
        found |= {"lora_rank": values.get("lora_r", 16), "lora_alpha": values.get("lora_alpha", 32)}
        found |= {"lora_dropout": values.get("lora_dropout", 0.05), "lora_target": "all"}
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        found |= {"quantization_bit": 4 if values.get("load_in_4bit") else 8, "quantization_method": "bnb"}
    elif values.get("dtype") == "bfloat16" and not values.get("use_peft"):
        found["pure_bf16"] = True
    if values.get("gradient_checkpointing") is False:
        found["disable_gradient_checkpointing"] = True
    lacks = {}
    if values.get("activation_offloading"):
        found["use_unsloth_gc"] = True  # which moves the inputs of checkpointed layers to the host
    if values.get("checkpointing_policy", "full") != "full":
        lacks["checkpointing_policy"] = "a checkpointed layer keeps nothing"
    return Settings(found, lacks)


def _unsloth(values: dict[str, Any], method: str) -> Settings:
    found = _trl(values, method)
    lacks = {**found.lacks, "checkpointing_policy": ""}
    if values.get("activation_offloading"):
        lacks["activation_offloading"] = ""  # use_gradient_checkpointing="unsloth" moves layers' inputs to the host
    return Settings({**values, "config": found.values}, lacks)


def _optimizer(values: Mapping[str, Any], name: str, translated: Callable[[str], str | None]) -> dict[str, Any]:
    optimizer = values.get("optim")
    if optimizer is None or optimizer in STOCHASTIC:
        return {}
    found = translated(optimizer)
    return {} if found is None else {name: found}


_AXOLOTL_OPTIMIZERS = {
    **{name: name for name in ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adafactor", "paged_adamw_32bit")},
    **{name: name for name in ("paged_adamw_8bit", "lion_8bit", "lion_32bit", "galore_adamw")},
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_torch_8bit": "ao_adamw_8bit",
    "adamw_torch_4bit": "ao_adamw_4bit",
}
NO_BUDGET = {"prefix_sharing": "the prompt of a row is computed once for each of its completions"}
TRAINERS: dict[str, Trainer] = {
    "trl": Trainer(
        "TRL",
        {name: {} for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo")},
        "trl METHOD --config FILE",
        _trl,
        NO_BUDGET,
    ),
    "axolotl": Trainer(
        "Axolotl",
        {
            "sft": {},
            "reward": {"reward_model": True},
            **{name: {"rl": name} for name in ("dpo", "kto", "orpo", "grpo")},
        },
        "axolotl train FILE (set `type` of the dataset as its format needs)",
        _axolotl,
        NO_BUDGET,
    ),
    "llama-factory": Trainer(
        "LLaMA-Factory",
        {
            "sft": {"stage": "sft"},
            "pretrain": {"stage": "pt"},
            "reward": {"stage": "rm"},
            "dpo": {"stage": "dpo"},
            "orpo": {"stage": "dpo", "pref_loss": "orpo"},
            "kto": {"stage": "kto"},
            "ppo": {"stage": "ppo"},
        },
        "llamafactory-cli train FILE (name dataset and template as its own tables have them)",
        _llama_factory,
        NO_BUDGET,
    ),
    "unsloth": Trainer(
        "Unsloth", {name: {} for name in ("sft", "dpo", "kto", "orpo", "grpo")}, "python FILE", _unsloth, NO_BUDGET
    ),
}
"""By the name that `--for` takes."""
