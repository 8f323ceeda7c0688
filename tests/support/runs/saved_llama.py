"""A tiny Llama, saved with a tokenizer, and options of a step of it by the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig

DESCRIBED = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "max_steps": 1,
    "logging_steps": 1,
}


def saved_model(folder: Path) -> Path:
    from lowtide.demo.model import make_tokenizer

    tokenizer = make_tokenizer()
    described = LlamaConfig(**{**DESCRIBED.to_dict(), "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(described).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
