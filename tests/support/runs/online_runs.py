"""Tiny runs of methods whose policy writes, on prompts of sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

import lowtide
from tests.support.references.parity_world import build_model, sums, tokenizer
from tests.support.runs.distilling import build_teacher
from tests.support.runs.on_a_cpu import ON_A_CPU

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    **ON_A_CPU,
}

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo", "gmpo")
"""Of GRPO."""


def loss_options(name: str) -> dict[str, Any]:
    """What chooses a loss of GRPO."""
    return {"loss_type": name, **({"importance_sampling_level": "sequence"} if name == "luspo" else {})}


def even_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs within a group: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def spread_where_even(completion_ids: list[list[int]], number: list[int], **kwargs: Any) -> list[float]:
    """As `even_tokens` for every other prompt; the completions of the others are rewarded alike."""
    found = even_tokens(completion_ids)
    return [0.5 if n % 2 else reward for n, reward in zip(number, found, strict=True)]


def every_third_token(completion_ids: list[list[int]], **kwargs: Any) -> list[list[tuple[int, float]] | None]:
    """Rewards of steps of three tokens, none of a completion that ends before one is over."""
    return [[(n, ids[n] % 5 / 4) for n in range(2, len(ids), 3)] if len(ids) > 2 else None for ids in completion_ids]


def prompts(count: int = 24) -> Dataset:
    return Dataset.from_list([{"prompt": question, "number": n} for n, (question, _) in enumerate(sums(count))])


def told_prompts(count: int = 24) -> Dataset:
    """Prompts with what a teacher alone is told."""
    told = [{"prompt": ask, "privileged_context": f"So: {answer}."} for ask, answer in sums(count)]
    return Dataset.from_list(told)


def online(
    folder: Path, method: str = "GRPO", *, model: Any = None, arguments: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A trainer that writes into a folder; its model is in float64, but for the norms, which Llama has in float32."""
    config = getattr(lowtide, f"{method}Config")(output_dir=str(folder), **SETTINGS | options)
    guide = {"teacher_model": build_teacher()} if method in ("Distillation", "IWOPD") else {"reward_funcs": even_tokens}
    given: dict[str, Any] = {**({} if method == "SDFT" else guide), "train_dataset": prompts(), **(arguments or {})}
    return getattr(lowtide, f"{method}Trainer")(
        model=build_model("llama").double() if model is None else model,
        args=config,
        **{"processing_class": tokenizer(), **given},
    )


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(folder: Path, method: str = "GRPO", **options: Any) -> Any:
    trainer = online(folder, method, **options)
    trainer.train()
    return trainer


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)
