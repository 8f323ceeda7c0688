"""Token classification against transformers' own Trainer: padded batches, its collator, the models' own loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, Trainer, TrainingArguments

from tests.support.marks import slow_but
from tests.support.models.tagging import TAGS, dataset, tagger, tokenizer, trainer
from tests.support.references.transformers_world import SAME, check_weights


def aligned(rows: Dataset, *, label_all_tokens: bool) -> Dataset:
    """As `run_ner.py` prepares them."""
    pieces = tokenizer()
    later = [TAGS.index(f"I-{tag[2:]}") if tag.startswith("B-") else n for n, tag in enumerate(TAGS)]

    def align(row: dict) -> dict:
        found = pieces(row["tokens"], truncation=True, is_split_into_words=True, max_length=24)
        labels, before = [], None
        for word in found.word_ids():
            if word is None:
                labels.append(-100)
            elif word != before:
                labels.append(row["ner_tags"][word])
            else:
                labels.append(later[row["ner_tags"][word]] if label_all_tokens else -100)
            before = word
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}

    return rows.map(align, remove_columns=rows.column_names)


def theirs(folder: Path, model: Any, rows: Dataset, **options: Any) -> Trainer:
    made = Trainer(
        copy.deepcopy(model),
        TrainingArguments(str(folder), **{**SAME, **options}),
        train_dataset=rows,
        data_collator=DataCollatorForTokenClassification(tokenizer()),
    )
    made.train()
    return made


CASES = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "modernbert": ("modernbert", {}),
    "electra": ("electra", {}),
    "deberta-v2": ("deberta-v2", {"padding_free": False}),
    "all tokens": ("bert", {"label_all_tokens": True}),
    "smoothed": ("bert", {"label_smoothing_factor": 0.1}),
    "accumulated": ("bert", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("case", slow_but(["roberta"], CASES))
def test_steps_are_those_of_transformers(case: str, tmp_path: Path):
    family, options = CASES[case]
    model, rows = tagger(family), dataset(64)
    # The Trainer would add up the means of micro-batches where gradients accumulate: these models' losses are means,
    # and are not told the number of all labels.
    shared = {name: options[name] for name in ("label_smoothing_factor",) if name in options}
    whole = aligned(rows, label_all_tokens=options.get("label_all_tokens", False))
    reference = theirs(tmp_path, model, whole, **shared)
    ours = trainer(tmp_path, rows, {"model": model}, **{**SAME, "max_length": 24, "long_rows": "cut", **options})
    ours.train()
    check_weights(ours, reference, learnt=0.1)


def test_rows_and_the_collator_of_transformers_are_taken(tmp_path: Path):
    model, rows = tagger("bert"), aligned(dataset(64), label_all_tokens=False)
    reference = theirs(tmp_path, model, rows)
    given = {"model": model, "data_collator": DataCollatorForTokenClassification(tokenizer())}
    ours = trainer(tmp_path, rows, given, **SAME)
    ours.train()
    check_weights(ours, reference, learnt=0.1)
