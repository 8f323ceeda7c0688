"""Token classification against transformers' own Trainer: padded batches, its collator, the models' own loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, Trainer, TrainingArguments

from tests.support.marks import slow_but
from tests.support.models.tagging import TAGS, dataset, tagger, tokenizer, trainer

STEPS = 20
SAME: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
    "weight_decay": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "optim": "adamw_torch",
    "max_grad_norm": 1.0,
    "seed": 7,
}


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


def losses(made: Any) -> np.ndarray:
    return np.array([entry["loss"] for entry in made.state.log_history if "loss" in entry])


def check_alike(ours: Any, reference: Any) -> None:
    assert len(losses(reference)) == STEPS
    np.testing.assert_allclose(losses(ours), losses(reference), rtol=1e-4, atol=1e-4)
    assert losses(ours)[-1] < losses(ours)[0] - 0.1
    for (name, mine), other in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
        if name.endswith(("key.bias", "k_lin.bias", "key_proj.bias")):
            continue  # softmax does not see it: its gradient is rounding, which AdamW makes large
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


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
def test_twenty_steps_are_those_of_transformers(case: str, tmp_path: Path):
    family, options = CASES[case]
    model, rows = tagger(family), dataset(64)
    # The Trainer would add up the means of micro-batches where gradients accumulate: these models' losses are means,
    # and are not told the number of all labels.
    shared = {name: options[name] for name in ("label_smoothing_factor",) if name in options}
    whole = aligned(rows, label_all_tokens=options.get("label_all_tokens", False))
    reference = theirs(tmp_path, model, whole, **shared)
    ours = trainer(tmp_path, rows, {"model": model}, **{**SAME, "max_length": 24, "long_rows": "cut", **options})
    ours.train()
    check_alike(ours, reference)


def test_rows_and_the_collator_of_transformers_are_taken(tmp_path: Path):
    model, rows = tagger("bert"), aligned(dataset(64), label_all_tokens=False)
    reference = theirs(tmp_path, model, rows)
    given = {"model": model, "data_collator": DataCollatorForTokenClassification(tokenizer())}
    ours = trainer(tmp_path, rows, given, **SAME)
    ours.train()
    check_alike(ours, reference)
