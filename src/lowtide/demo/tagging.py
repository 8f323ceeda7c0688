"""The demo of token classification: mark the larger of the two numbers of a question, digit by digit.

"Which is larger, 17 or 25?" has an entity of type LARGER, 25. Whether a digit belongs to it depends on digits to its
left and to its right, so that a model has to read in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from lowtide.demo.data import Question
from lowtide.demo.model import SMALL
from lowtide.engine.heads.classes import TokenClasses
from lowtide.engine.weights.loading import load_model, load_tokenizer

LABELS = ("O", "B-LARGER", "I-LARGER")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
AT_A_TIME = 50


def tagged(question: Question) -> tuple[list[str], list[str]]:
    """The words of a question, each digit one, and their labels. Of equal numbers both are marked."""
    words, labels = ["Which", "is", "larger", ","], ["O"] * 4
    largest = max(question.left, question.right)
    for number, after in ((question.left, "or"), (question.right, "?")):
        digits = [*str(number)]
        words += [*digits, after]
        labels += [*(["B-LARGER", "I-LARGER"][: len(digits)] if number == largest else ["O"] * len(digits)), "O"]
    return words, labels


def tagged_rows(question: Question) -> Iterator[dict[str, Any]]:
    """A question as a row: `{"tokens": [...], "ner_tags": [...]}`."""
    words, labels = tagged(question)
    yield {"tokens": words, "ner_tags": labels}


def save_tagger(folder: Path, seed: int) -> None:
    """Make a BERT of two layers with random weights, without a head for labels, and its tokenizer, and save them."""
    words = dict.fromkeys([*SPECIAL, *"0123456789", *tagged(Question(0, 0))[0]])
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    named = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        **SMALL,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForMaskedLM(config).save_pretrained(folder)


@torch.no_grad()
def predicted_labels(folder: Path, questions: Sequence[Question], seed: int) -> list[list[str]]:
    """The labels that a saved model gives the words of each question; a model without a head for them gets one."""
    torch.manual_seed(seed)
    model, tokenizer = load_model(str(folder), head=TokenClasses, labels=LABELS).eval(), load_tokenizer(str(folder))
    names: Any = model.config.id2label
    found = []
    for start in range(0, len(questions), AT_A_TIME):
        words = [tagged(question)[0] for question in questions[start : start + AT_A_TIME]]
        inputs = tokenizer(words, is_split_into_words=True, padding=True, return_tensors="pt")
        likeliest = model(**inputs).logits.argmax(-1).tolist()
        # Each word is one token, behind the one that begins the row.
        found += [[names[n] for n in row[1 : 1 + len(own)]] for row, own in zip(likeliest, words, strict=True)]
    return found


def marked(question: Question, labels: Sequence[str]) -> str:
    """The digits that are labelled, in order."""
    return "".join(word for word, label in zip(tagged(question)[0], labels, strict=True) if label != "O") or "nothing"
