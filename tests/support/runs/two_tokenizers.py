"""Two models with tokenizers of their own, and rows for both."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide.data.byte_pairs import learn_tokenizer
from tests.support.references.parity_world import SMALL, sums

TEXTS = [f"{ask} {answer}" for ask, answer in sums(60, 3)]


def tokenizers() -> tuple[Any, Any]:
    """The student's and the teacher's, learned from other texts, of other sizes."""
    return learn_tokenizer(TEXTS, 300), learn_tokenizer([text[::-1] for text in TEXTS] + TEXTS[:2], 290)


def model(kind: str, vocab: int, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = SMALL | {"model_type": kind, "vocab_size": vocab} | more
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float64)


def rows(count: int = 12, seed: int = 0) -> Dataset:
    return Dataset.from_list([{"prompt": ask, "completion": f" {answer}"} for ask, answer in sums(count, seed)])
