"""A tiny model, its tokenizer and rows for every method, for cases that begin with a run that would train."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from datasets import Dataset

from lowtide.demo.model import make_model, make_tokenizer, save

METHODS = ("sft", "dpo", "kto", "reward", "orpo", "cpo", "bco")
UNPAIRED = ("kto", "bco")
TRAIN = "--model {model} --dataset {rows} --output_dir out --use_cpu --disable_tqdm --max_steps 1"
"""The words of a run that trains one step in the case's folder."""


def rows_of(method: str, count: int = 4) -> list[dict[str, Any]]:
    """Rows that a method trains on."""
    if method == "sft":
        return [{"text": f"{n} + {n} = {2 * n}"} for n in range(count)]
    if method in UNPAIRED:
        return [{"prompt": f"{n} + 1", "completion": f" = {n}", "label": n % 2 == 0} for n in range(count)]
    return [{"prompt": f"{n} + 1", "chosen": f" = {n + 1}", "rejected": f" = {n}"} for n in range(count)]


def dataset(method: str = "sft") -> Dataset:
    """The same as a dataset."""
    return Dataset.from_list(rows_of(method))


def model() -> Any:
    """A language model of random weights, not saved."""
    return make_model(make_tokenizer(), seed=0)


def world(folder: Path) -> Path:
    """The folder `tiny` beside those of all cases, with a model and `METHOD.jsonl`; made by the first that asks."""
    there = folder.parents[1] / "tiny"
    if there.is_dir():
        return there
    made = folder.parent / "tiny"
    save(made / "model", seed=0)
    for method in METHODS:
        (made / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(method)))
    try:
        os.rename(made, there)
    except OSError:  # another case was first
        shutil.rmtree(made)
    return there
