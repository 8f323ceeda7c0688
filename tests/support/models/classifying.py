"""Small classifiers of texts of several families, their tokenizer, and texts with labels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, Value
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from lowtide import SequenceClassificationConfig, SequenceClassificationTrainer
from tests.support.models.encoders import STEPS, with_larger_weights

CLASSES = ("cold", "warm", "hot")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
WORDS = ("ice", "snow", "frost", "mild", "soft", "tea", "fire", "oven", "lava", "a", "the", "and", "of", "very")
KINDS = {word: n // 3 for n, word in enumerate(WORDS[:9])}
"""The class that a word speaks for."""
VOCABULARY = len(SPECIAL) + len(WORDS)
SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"type_vocab_size": 1},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "modernbert": {
        **{"local_attention": 8, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2},
        **{"cls_token_id": 1, "sep_token_id": 2, "classifier_dropout": 0.0, "classifier_pooling": "mean"},
    },
    "deberta-v2": {},
    "llama": {"num_key_value_heads": 2},
}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "seq_classif_dropout"), 0.0
)


def tokenizer(*, types: bool = True) -> PreTrainedTokenizerFast:
    """A token for each word, [CLS] before and [SEP] after each text; with types, the second text of a pair has 1."""
    words = [*SPECIAL, *WORDS]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    named = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token"), SPECIAL, strict=True))
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **named)


def words_and_class(rng: random.Random, longest: int) -> tuple[str, int]:
    """A text, and the class that most of its words speak for; the smallest of several."""
    words = rng.choices(WORDS, k=rng.randint(1, longest))
    votes = [sum(KINDS.get(word) == kind for word in words) for kind in range(3)]
    return " ".join(words), votes.index(max(votes))


def dataset(count: int = 40, *, kind: str = "class", pairs: bool = False, longest: int = 12, seed: int = 0) -> Dataset:
    """Texts with labels.

    Args:
        kind: "class" (numbers that have names), "name", "vector" (0 and 1 of each class), "set" (names of those that
            hold), or "value".
        pairs: whether a row has two texts, of which the first says the label.
    """
    rng, rows = random.Random(seed), []
    for _ in range(count):
        text, found = words_and_class(rng, longest)
        held = [n for n in range(3) if any(KINDS.get(word) == n for word in text.split())]
        label: Any = {
            "class": found,
            "name": CLASSES[found],
            "vector": [float(n in held) for n in range(3)],
            "set": [CLASSES[n] for n in held],
            "value": found + 0.25 * len(held),
        }[kind]
        texts = {"premise": text, "hypothesis": words_and_class(rng, longest)[0]} if pairs else {"text": text}
        rows.append({**texts, "label": label})
    if kind != "class":
        return Dataset.from_list(rows)
    texts = {name: Value("string") for name in rows[0] if name != "label"}
    return Dataset.from_list(rows, Features({**texts, "label": ClassLabel(names=list(CLASSES))}))


def classifier(family: str = "bert", labels: int = 3, **changes: Any) -> Any:
    torch.manual_seed(0)
    names = {"id2label": dict(enumerate(CLASSES))} if labels == 3 else {}
    config = AutoConfig.for_model(
        family, **{**SIZES, **NO_DROPOUT, **FAMILIES[family], "num_labels": labels, **names, **changes}
    )
    model = AutoModelForSequenceClassification.from_config(config)
    return with_larger_weights(model)


def trainer(folder: Path, rows: Dataset | None = None, arguments: dict | None = None, **options: Any) -> Any:
    """A small trainer without dropout."""
    settings = {"output_dir": str(folder), **STEPS, **options}
    given = {"model": None, "processing_class": tokenizer(), **(arguments or {})}
    model = given.pop("model")
    return SequenceClassificationTrainer(
        classifier() if model is None else model,
        SequenceClassificationConfig(**settings),
        train_dataset=dataset() if rows is None else rows,
        **given,
    )
