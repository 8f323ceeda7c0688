"""The demo of replaced-token detection: sums, a tiny ELECTRA, and the digit of each that it finds to be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, ElectraConfig, ElectraForPreTraining, PreTrainedTokenizerFast

from lowtide.demo.data import Question
from lowtide.demo.hidden import MASK, sum_of_last_digits, worked
from lowtide.demo.model import PAD, SMALL, make_tokenizer
from lowtide.engine.weights.complete_weights import quiet_report


def make_discriminator(seed: int) -> tuple[ElectraForPreTraining, PreTrainedTokenizerFast]:
    """An ELECTRA of two layers with random weights, 0.2 million parameters, and its tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": MASK})
    tokenizer.padding_side = "right"
    vocabulary = tokenizer.get_vocab()
    torch.manual_seed(seed)
    config = ElectraConfig(
        vocab_size=len(vocabulary),
        embedding_size=96,
        **SMALL,
        max_position_embeddings=64,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=vocabulary[PAD],
    )
    return ElectraForPreTraining(config), tokenizer


def wrong_digit(question: Question) -> str:
    """Another digit for the last one of the sum of a question's last digits; numbers and result contradict it."""
    return str((int(sum_of_last_digits(question)) + 1 + (question.left + question.right) % 9) % 10)


def with_wrong_digit(question: Question) -> str:
    """The working in which it stands."""
    return worked(question, sum_of_last_digits(question)[:-1] + wrong_digit(question))


@torch.inference_mode()
def most_suspect(folder: Path, questions: Sequence[Question]) -> list[tuple[str, bool]]:
    """Which token of each question's wrong working the model in `folder` holds to be replaced before all others: the
    working, with it in brackets, and whether it is the wrong digit."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with quiet_report(str(folder)):  # that the generator beside it is not used
        model: Any = ElectraForPreTraining.from_pretrained(folder, dtype="float32").eval()
    texts = [with_wrong_digit(each) for each in questions]
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    logits = model(**inputs).logits.masked_fill(inputs["attention_mask"] == 0, -torch.inf)
    found = []
    for text, number in zip(texts, logits.argmax(-1).tolist(), strict=True):
        tokens = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        start, stop = tokens[number]
        found.append((f"{text[:start]}[{text[start:stop]}]{text[stop:]}", stop == text.index(",")))
    return found
