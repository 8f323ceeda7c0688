"""Sequence classification against transformers' own Trainer: padded batches, its collator, the models' own loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from tests.support.marks import slow_but
from tests.support.models.classifying import classifier, dataset, tokenizer, trainer
from tests.support.references.transformers_world import SAME, check_weights


def encoded(rows: Dataset, pieces: Any) -> Dataset:
    """As `run_classification.py` prepares them."""
    texts = [name for name in rows.column_names if name != "label"]
    columns = rows.map(lambda row: {**pieces(*(row[name] for name in texts), truncation=True, max_length=10)})
    return columns.remove_columns(texts)


def theirs(folder: Path, model: Any, rows: Dataset, pieces: Any, **options: Any) -> Trainer:
    made = Trainer(
        copy.deepcopy(model),
        TrainingArguments(str(folder), **{**SAME, **options}),
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(pieces),
    )
    made.train()
    return made


CASES: dict[str, tuple[str, dict, dict]] = {
    "bert": ("bert", {}, {}),
    "roberta": ("roberta", {}, {}),
    "modernbert": ("modernbert", {}, {}),
    "distilbert": ("distilbert", {}, {}),
    "electra": ("electra", {}, {}),
    "deberta-v2": ("deberta-v2", {}, {"padding_free": False}),
    "llama": ("llama", {}, {}),
    "pairs": ("bert", {"pairs": True}, {}),
    "several labels": ("bert", {"kind": "vector"}, {}),
    "values": ("roberta", {"kind": "value"}, {}),
    "values of a decoder": ("llama", {"kind": "value"}, {}),
    "smoothed": ("bert", {}, {"label_smoothing_factor": 0.1}),
    "accumulated": ("bert", {}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("case", slow_but(["roberta"], CASES))
def test_steps_are_those_of_transformers(case: str, tmp_path: Path):
    family, data, options = CASES[case]
    pieces = tokenizer(types=family == "bert")
    model, rows = classifier(family, labels=1 if data.get("kind") == "value" else 3), dataset(64, **data)
    # The Trainer would add up the means of micro-batches where gradients accumulate: these models' losses are means,
    # and are not told the number of all labels.
    shared = {name: options[name] for name in ("label_smoothing_factor",) if name in options}
    reference = theirs(tmp_path, model, encoded(rows, pieces), pieces, **shared)
    given = {"model": model, "processing_class": pieces}
    ours = trainer(tmp_path, rows, given, **{**SAME, "max_length": 10, **options})
    ours.train()
    check_weights(ours, reference, learnt=0.0)
    # DeBERTa does not write it down; and the Trainer's smoother takes the labels away from the model.
    assert reference.model.config.problem_type in (None, ours.model.config.problem_type)
