"""Greedy answers of a saved model to questions, and how many of them are exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.demo.data import Question
from lowtide.terminal import Console

BATCH = 100
MOST_TOKENS = 16
"""The longest answer is 13 tokens, its end included."""


@torch.inference_mode()
def answers(folder: Path, questions: Sequence[Question], description: str) -> list[str]:
    """What the model in `folder` answers, decoded greedily, in the order of the questions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    batches = [questions[start : start + BATCH] for start in range(0, len(questions), BATCH)]
    found: list[str] = []
    for batch in track(batches, description, console=Console(stderr=True)):
        prompts = [question.messages[:1] for question in batch]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MOST_TOKENS)
        written = output[:, inputs["input_ids"].shape[1] :]
        found += tokenizer.batch_decode(written, skip_special_tokens=True)
    return found


def exact_match(found: Sequence[str], questions: Sequence[Question]) -> float:
    """The share of answers that are right to the last character."""
    return sum(text == question.answer for text, question in zip(found, questions, strict=True)) / len(questions)
