"""A plan as a script for Unsloth, whose settings are arguments of `FastLanguageModel` and of TRL's trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "grpo": "GRPO"}
OF_THE_MODEL = ("model_name_or_path", "dataset_name", "use_peft", "lora_r", "lora_alpha", "lora_dropout")
OF_THE_MODEL += ("lora_target_modules", "load_in_4bit", "load_in_8bit", "dtype", "gradient_checkpointing")
OF_THE_MODEL += ("activation_offloading",)


def unsloth_script(values: Mapping[str, Any], method: str) -> str:
    """The script.

    Args:
        values: of a plan, with those of TRL's config as `config`.
        method: whose trainer it uses.
    """
    name, config = TRAINERS[method], dict(values["config"])
    checkpointing = _checkpointing(values)
    arguments = {key: value for key, value in config.items() if key not in OF_THE_MODEL}
    loaded = {
        "model_name": values.get("model"),
        "max_seq_length": values.get("max_length") or 1024,
        "load_in_4bit": bool(values.get("load_in_4bit")),
        "load_in_8bit": bool(values.get("load_in_8bit")),
        "full_finetuning": not values.get("use_peft"),
        "use_gradient_checkpointing": checkpointing,
    }
    lines = [
        "from unsloth import FastLanguageModel",
        f"from trl import {name}Config, {name}Trainer",
        "from datasets import load_dataset",
        "",
        f"model, tokenizer = FastLanguageModel.from_pretrained({_written(loaded)})",
    ]
    if values.get("use_peft"):
        adapter = {"r": values.get("lora_r", 16), "lora_alpha": values.get("lora_alpha", 32)}
        adapter |= {"lora_dropout": values.get("lora_dropout", 0.05), "use_gradient_checkpointing": checkpointing}
        lines.append(f"model = FastLanguageModel.get_peft_model(model, {_written(adapter)})")
    lines += [
        f'dataset = load_dataset({values.get("dataset")!r}, split="train")',
        f"trainer = {name}Trainer(model=model, processing_class=tokenizer, train_dataset=dataset,",
        f"    args={name}Config({_written(arguments)}))",
        "trainer.train()",
    ]
    return "\n".join(lines) + "\n"


def _checkpointing(values: Mapping[str, Any]) -> bool | str:
    """Its own kind moves the inputs of layers to the host."""
    if values.get("gradient_checkpointing") is False:
        return False
    return "unsloth" if values.get("activation_offloading") else True


def _written(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
