"""A plan as a script for Unsloth, whose settings are arguments of `FastLanguageModel` and of TRL's trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.planner.answers.translations import DATASET, reader_of

TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "grpo": "GRPO"}


def unsloth_script(values: Mapping[str, Any], method: str) -> str:
    """The script.

    Args:
        values: of the model and its rows, with those of TRL's config as `config`.
        method: whose trainer it uses.
    """
    name, config = TRAINERS[method], values["config"]
    checkpointing = bool(values["checkpoints"]) and ("unsloth" if values["offloads"] else True)
    loaded = {
        "model_name": values.get("model"),
        "max_seq_length": config.get("max_length") or 1024 + config.get("max_completion_length", 0),
        "load_in_4bit": bool(values.get("load_in_4bit")),
        "load_in_8bit": bool(values.get("load_in_8bit")),
        "full_finetuning": not values.get("use_peft"),
        "use_gradient_checkpointing": checkpointing,
    }
    if values.get("trust_remote_code"):
        loaded["trust_remote_code"] = True
    lines = [
        "from unsloth import FastLanguageModel",
        f"from trl import {name}Config, {name}Trainer",
        "from datasets import load_dataset",
        "",
        f"model, tokenizer = FastLanguageModel.from_pretrained({_written(loaded)})",
    ]
    if values.get("use_peft"):
        lines.append(f"model = FastLanguageModel.get_peft_model(model, {_written(_adapter(values, checkpointing))})")
    rewards = ""
    if method == "grpo":
        lines.append("REWARD_FUNCS = []  # a placeholder: put yours here")
        rewards = " reward_funcs=REWARD_FUNCS,"
    rows = values.get("dataset") or DATASET
    comment = "  # a placeholder: put yours here" if rows == DATASET else ""
    lines.append(f"dataset = {_loaded(rows, values.get('dataset_split', 'train'))}{comment}")
    evaluated = ""
    if config.get("eval_strategy", "no") != "no":
        others, split = values.get("eval_dataset"), values.get("eval_split")
        lines.append(f"evaluated = {_loaded(others or rows, split or ('train' if others else 'test'))}")
        evaluated = " eval_dataset=evaluated,"
    lines += [
        f"trainer = {name}Trainer(model=model, processing_class=tokenizer, train_dataset=dataset,{evaluated}{rewards}",
        f"    args={name}Config({_written(config)}))",
        "trainer.train()",
    ]
    return "\n".join(lines) + "\n"


def _loaded(rows: str, split: str) -> str:
    """What loads rows of the hub, or of a file, which has one split."""
    reader = reader_of(rows)
    if reader is None:
        return f"load_dataset({rows!r}, split={split!r})"
    return f"load_dataset({reader!r}, data_files={rows!r}, split='train')"


def _adapter(values: Mapping[str, Any], checkpointing: bool | str) -> dict[str, Any]:
    """Arguments of `get_peft_model`, whose own choice of layers is all linear ones."""
    found = {"r": values.get("lora_r", 16), "lora_alpha": values.get("lora_alpha", 32)}
    found |= {"lora_dropout": values.get("lora_dropout", 0.05), "use_gradient_checkpointing": checkpointing}
    names = {"lora_target_modules": "target_modules", "use_rslora": "use_rslora"}
    names |= {"lora_modules_to_save": "modules_to_save"}
    found |= {there: values[here] for here, there in names.items() if values.get(here)}
    return {name: value for name, value in found.items() if (name, value) != ("target_modules", "all-linear")}


def _written(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
