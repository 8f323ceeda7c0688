"""lowtide's Seq2SeqTrainer against transformers': steps from the same weights, on the same rows in the same order.

transformers pads sources and targets of a batch to its longest ones, and computes the logits of every place.
Accumulated, it divides the sum over all micro-batches by the scored tokens only where the model's loss takes their
number, which that of encoder-decoders does not; ours is compared with its step of the whole batch.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.support.marks import slow_or_sweep
from tests.support.models.pairs_of_texts import COMMON, FAMILIES, build, make, tokenized, tokenizer
from tests.support.references.transformers_world import FEWER_STEPS, check_training

SETTINGS = {
    **COMMON,
    "max_steps": FEWER_STEPS,
    "train_sampling_strategy": "sequential",
    "per_device_eval_batch_size": 8,
}
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding_free": False},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpointed, within a token budget": {"gradient_checkpointing": True, "tokens_per_microbatch": 60},
}
"""Options of lowtide alone."""
BOTH: dict[str, dict[str, Any]] = {"nll": {}, "smoothed": {"label_smoothing_factor": 0.1}}
FIRST = ("plain", "nll", "t5")
CELLS = {
    cell: cell[2] == "t5" or sum(places) % 2 == 0
    for places, cell in zip(
        product(*(range(len(each)) for each in (OURS, BOTH, FAMILIES))), product(OURS, BOTH, FAMILIES), strict=True
    )
    if cell != FIRST
}
"""Whether a cell is a slow test: any two of an option, a loss and a family meet in one. The others are the sweep."""


def theirs(family: str, folder: Path, rows: Dataset, held_out: Dataset, **options: Any) -> Seq2SeqTrainer:
    args = {name: value for name, value in SETTINGS.items() if name != "rehearsal"}
    model = build(family)
    return Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(output_dir=str(folder), **args, **options),
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model),
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize(
    ("name", "loss", "family"), [FIRST, *slow_or_sweep(CELLS, [cell for cell, slow in CELLS.items() if slow])]
)
def test_steps_agree_with_transformers(name: str, loss: str, family: str, tmp_path: Path):
    rows, held_out = tokenized(60), tokenized(8, seed=1)
    reference = theirs(family, tmp_path / "theirs", rows, held_out, **BOTH[loss])
    options = {**SETTINGS, **BOTH[loss], **OURS[name]}
    ours = make(tmp_path / "ours", rows, family=family, eval_dataset=held_out, **options)
    assert ours.padding_free == (name != "padded")
    check_training(ours, reference)
