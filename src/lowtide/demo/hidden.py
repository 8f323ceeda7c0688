"""The demo of masked language modelling: sums with hidden digits, a tiny encoder, and the numbers that it fills in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from lowtide.demo.data import Question
from lowtide.demo.model import END, PAD, SMALL, START, make_tokenizer

MASK = "<|mask|>"


def text_rows(question: Question) -> Iterator[dict[str, Any]]:
    """The numbers and the answer as one text: `{"text": ...}`."""
    yield {"text": worked(question, sum_of_last_digits(question))}


def make_encoder(seed: int) -> tuple[ModernBertForMaskedLM, PreTrainedTokenizerFast]:
    """A ModernBERT of two layers with random weights, 0.2 million parameters, and its tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": MASK})
    vocabulary = tokenizer.get_vocab()
    torch.manual_seed(seed)
    config = ModernBertConfig(
        vocab_size=len(vocabulary),
        **SMALL,
        max_position_embeddings=128,
        pad_token_id=vocabulary[PAD],
        bos_token_id=vocabulary[START],
        cls_token_id=vocabulary[START],
        eos_token_id=vocabulary[END],
        sep_token_id=vocabulary[END],
    )
    return ModernBertForMaskedLM(config), tokenizer


@torch.inference_mode()
def filled(folder: Path, questions: Sequence[Question], description: str) -> list[str]:
    """What the model in `folder` puts in the place of the sum of each question's last digits, which is hidden."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForMaskedLM.from_pretrained(folder, dtype="float32").eval()
    hidden = [worked(each, MASK * len(sum_of_last_digits(each))) for each in questions]
    inputs = tokenizer(hidden, padding=True, return_tensors="pt", return_token_type_ids=False)
    best = model(**inputs).logits.argmax(-1)[inputs["input_ids"] == tokenizer.mask_token_id]
    return [tokenizer.decode(each) for each in best.split([len(sum_of_last_digits(each)) for each in questions])]


def sum_of_last_digits(question: Question) -> str:
    return str(question.left % 10 + question.right % 10)


def worked(question: Question, ones: str) -> str:
    """The numbers, the working with the sum of their last digits, and the result."""
    left, right = question.left, question.right
    return f"{left} + {right}\n{left % 10} + {right % 10} = {ones}, so {left + right}"
