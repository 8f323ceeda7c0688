"""Encoders' tasks: their rows, tokenizer and models."""

import random
from typing import Any

from bench.inputs.generated import lognormal_lengths, word_source

NAMES = {"masked-lm": "MaskedLM", "token-classification": "TokenClassification"}
"""How lowtide's and transformers' classes of a task are called."""
LONGEST = 510
"""Words of the longest row: with its two special tokens it fills the model's 512 positions."""
VOCABULARY = 30_000
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def rows_of(task: str, number: int) -> list[dict[str, Any]]:
    """Rows of log-normal lengths (median 60 words, sigma 1.0)."""
    rng = random.Random(0)
    draw = word_source(rng)
    texts = [draw(length) for length in lognormal_lengths(60, 1.0, rng, rows=number, shortest=4, longest=LONGEST)]
    if task == "masked-lm":
        return [{"text": " ".join(words)} for words in texts]
    return [{"tokens": words, "ner_tags": [rng.randrange(len(LABELS)) for _ in words]} for words in texts]


def words_tokenizer(rows: list[dict[str, Any]]) -> Any:
    """A tokenizer to which each word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for row in rows for word in row.get("tokens") or row["text"].split()})
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": text for name, text in names.items()}
    )


def model_of(task: str) -> Any:
    """The BERT of a task, of seeded weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{NAMES[task]}")(transformers.BertConfig(**described(task)))


def described(task: str) -> dict[str, Any]:
    """Its configuration."""
    named = {"num_labels": len(LABELS), "id2label": dict(enumerate(LABELS))} if task == "token-classification" else {}
    return {"vocab_size": VOCABULARY, **SIZES, **named}
