"""Small token classifiers of several families, their tokenizer, and words with labels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedTokenizerFast

from lowtide import TokenClassificationConfig, TokenClassificationTrainer
from tests.support.models.encoders import STEPS, with_larger_weights

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
LETTERS = "abcdefghij"
VOCABULARY = len(SPECIAL) + 2 * len(LETTERS)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "modernbert": {
        **{"local_attention": 8, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2},
        **{"cls_token_id": 1, "sep_token_id": 2, "classifier_dropout": 0.0},
    },
    "deberta-v2": {},
}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "seq_classif_dropout"), 0.0
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A piece for each letter, `##` before all but a word's first, between [CLS] and [SEP]."""
    pieces = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    made = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    named = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)


def words_and_tags(count: int, longest: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Words of one to four letters; those that begin with a or b are persons, with c places."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words = ["".join(rng.choices(LETTERS, k=rng.randint(1, 4))) for _ in range(rng.randint(1, longest))]
        kinds = ["PER" if word[0] in "ab" else "LOC" if word[0] == "c" else "" for word in words]
        tags = ["O" if not k else f"{'I' if n and kinds[n - 1] == k else 'B'}-{k}" for n, k in enumerate(kinds)]
        rows.append({"tokens": words, "ner_tags": tags})
    return rows


def dataset(count: int = 40, longest: int = 12, seed: int = 0, names: Sequence[str] | None = TAGS) -> Dataset:
    """With the labels as numbers that have names, or as texts."""
    rows = words_and_tags(count, longest, seed)
    if names is None:
        return Dataset.from_list(rows)
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=list(names)))})
    return Dataset.from_list(
        [{**row, "ner_tags": [names.index(tag) for tag in row["ner_tags"]]} for row in rows], features
    )


def tagger(family: str = "bert", labels: Sequence[str] = TAGS, **changes: Any) -> Any:
    torch.manual_seed(0)
    values = {**SIZES, **NO_DROPOUT, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(family, **values, num_labels=len(labels), id2label=dict(enumerate(labels)))
    model = AutoModelForTokenClassification.from_config(config)
    return with_larger_weights(model)


def trainer(folder: Path, rows: Dataset | None = None, arguments: dict | None = None, **options: Any) -> Any:
    """A small trainer without dropout."""
    settings = {"output_dir": str(folder), **STEPS, **options}
    given = {"model": None, "processing_class": tokenizer(), **(arguments or {})}
    model = given.pop("model")
    return TokenClassificationTrainer(
        tagger() if model is None else model,
        TokenClassificationConfig(**settings),
        train_dataset=dataset() if rows is None else rows,
        **given,
    )
