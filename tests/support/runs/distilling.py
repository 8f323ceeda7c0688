"""Tiny runs of distillation: a student, a teacher of another family and size, and conversations of sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowtide import GKDConfig, GKDTrainer
from tests.support.references.parity_world import SMALL, assistant, build_model, sums, tokenizer, user
from tests.support.runs.on_a_cpu import ON_A_CPU

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "lmbda": 0.0,
    "max_new_tokens": 12,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    **ON_A_CPU,
}


def build_teacher(dtype: torch.dtype = torch.float64, **more: Any) -> PreTrainedModel:
    """Wider and deeper than the student, of another model type."""
    torch.manual_seed(1)
    config = SMALL | {"model_type": "qwen2", "hidden_size": 96, "num_hidden_layers": 3} | more
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)


def other_tokens() -> Any:
    """A tokenizer of the same tokens and one more."""
    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    found = type(tokenizer())(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    found.add_tokens(["<other>"])
    return found


def talks(count: int = 24, seed: int = 0) -> Dataset:
    return Dataset.from_list([{"messages": [user(ask), assistant(answer)]} for ask, answer in sums(count, seed)])


def distilling(folder: Path, *, model: Any = None, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    """A trainer that writes into a folder; its models are in float64, but for the norms of Llama."""
    given = {"teacher_model": build_teacher(), "train_dataset": talks()} | (arguments or {})
    return GKDTrainer(
        model=build_model("llama").double() if model is None else model,
        args=GKDConfig(output_dir=str(folder), **SETTINGS | options),
        processing_class=tokenizer(),
        **given,
    )


def trained(folder: Path, **options: Any) -> Any:
    trainer = distilling(folder, **options)
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def losses(trainer: Any) -> Tensor:
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], dtype=torch.float64)
