"""lowtide's MaskedLMTrainer against transformers' own Trainer: steps from the same weights, on the same rows with the
same masks, in the same order.

transformers pads each batch to its longest row and computes the logits of every token. Masks are drawn before, so that
both see the same; a row with labels is taken as it is. Accumulated, transformers takes the mean of the micro-batches'
means, which weighs tokens by their micro-batch; ours is compared with its step of the whole batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification, Trainer, TrainingArguments

from tests.support.marks import slow_but
from tests.support.models.masked_texts import COMMON, FAMILIES, PAD, build, make, texts, tokenizer
from tests.support.references.transformers_world import FEWER_STEPS, check_training

SETTINGS = {**COMMON, "max_steps": FEWER_STEPS, "train_sampling_strategy": "sequential", "learning_rate": 1e-3}
SETTINGS |= {"per_device_eval_batch_size": 8}
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpointed, within a token budget": {"gradient_checkpointing": True, "tokens_per_microbatch": 60},
}
"""Options of lowtide alone."""
BOTH: dict[str, dict[str, Any]] = {"smoothed": {"label_smoothing_factor": 0.1}}
"""Options of both."""


def masked_rows(count: int, seed: int) -> Dataset:
    """Rows with the masks of transformers' collator, 80/10/10, and their labels. Those are left out that have none, and
    those into which it drew the padding token, from which RoBERTa would count positions otherwise."""
    collate = DataCollatorForLanguageModeling(tokenizer(), seed=seed)
    rows = []
    for text in texts(count, seed=seed)["text"]:
        found = collate([{"input_ids": tokenizer()(text)["input_ids"]}])
        rows.append({name: found[name][0].tolist() for name in ("input_ids", "labels")})
    return Dataset.from_list([row for row in rows if max(row["labels"]) >= 0 and PAD not in row["input_ids"]])


def theirs(family: str, folder: Path, rows: Dataset, held_out: Dataset, **options: Any) -> Trainer:
    args = {name: value for name, value in SETTINGS.items() if name != "rehearsal"} | options
    return Trainer(
        build(family),
        TrainingArguments(output_dir=str(folder), **args),
        data_collator=DataCollatorForTokenClassification(tokenizer()),
        train_dataset=rows,
        eval_dataset=held_out,
    )


@pytest.mark.parametrize("family", slow_but([next(iter(FAMILIES))], FAMILIES))
@pytest.mark.parametrize("name", slow_but(["plain"], [*OURS, *BOTH]))
def test_steps_agree_with_transformers(name: str, family: str, tmp_path: Path):
    rows, held_out = masked_rows(60, seed=0), masked_rows(8, seed=1)
    shared, own = BOTH.get(name, {}), OURS.get(name, {})
    reference = theirs(family, tmp_path / "theirs", rows, held_out, **shared)
    ours = make(tmp_path / "ours", rows, family=family, eval_dataset=held_out, **SETTINGS | shared | own)
    check_training(ours, reference)
