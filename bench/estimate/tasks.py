"""The tasks beside post-training whose peaks are predicted and measured: their rows, tokenizers and models' classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.tasks import encoders, pairs
from bench.vision import child as vision_child

CLASSES = ("first", "second", "third", "fourth")
"""The labels of texts."""
VISION = "vision-language"


@dataclass(frozen=True)
class Task:
    """What a run of a task is made of beside its model's config."""

    public: str
    """`SFT` of `SFTTrainer`."""
    head: str
    """`CausalLM` of `AutoModelForCausalLM`."""
    rows: Callable[[int], list[dict[str, Any]]]
    tokenizer: Callable[[list[dict[str, Any]]], Any]
    config_values: Mapping[str, Any] = field(default_factory=dict)
    """What the model's config says beside its sizes."""
    longest: tuple[str, ...] = ("max_length",)
    """The options that say how long a row may be."""


def _texts(number: int) -> list[dict[str, Any]]:
    return encoders.rows_of("masked-lm", number)


def _labelled(number: int) -> list[dict[str, Any]]:
    return [{**row, "label": CLASSES[at % len(CLASSES)]} for at, row in enumerate(_texts(number))]


def _with_end(rows: list[dict[str, Any]]) -> Any:
    tokenizer = encoders.words_tokenizer(rows)
    tokenizer.eos_token = tokenizer.sep_token
    return tokenizer


TASKS: dict[str, Task] = {
    "masked-lm": Task("MaskedLM", "MaskedLM", _texts, encoders.words_tokenizer),
    "replaced-token-detection": Task("ReplacedTokenDetection", "PreTraining", _texts, encoders.words_tokenizer),
    "token-classification": Task(
        "TokenClassification",
        "TokenClassification",
        lambda number: encoders.rows_of("token-classification", number),
        encoders.words_tokenizer,
        {"num_labels": len(encoders.LABELS)},
    ),
    "sequence-classification": Task(
        "SequenceClassification",
        "SequenceClassification",
        _labelled,
        encoders.words_tokenizer,
        {"num_labels": len(CLASSES)},
    ),
    "seq2seq": Task(
        "Seq2Seq",
        "Seq2SeqLM",
        pairs.rows_of,
        pairs.words_tokenizer,
        longest=("max_source_length", "max_target_length"),
    ),
    "pretrain": Task("Pretrain", "CausalLM", _texts, _with_end),
    VISION: Task("SFT", "ImageTextToText", vision_child.rows_of, vision_child.processor_of),
}
"""By the names of their commands; images are fine-tuned on by SFT."""
