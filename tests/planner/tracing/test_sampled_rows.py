"""What is planned by a sample of the rows, against the same by all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from datasets import Dataset
from transformers import LlamaConfig

import lowtide
from lowtide.data.batches.heaviest import heaviest_rows, row_lengths
from lowtide.demo.model import make_tokenizer
from lowtide.planner.devices import device_named
from lowtide.planner.tracing.fake_run import SAMPLE, FakeRun
from lowtide.run.options.configs import method_of

ROWS = 3 * SAMPLE


def text(rng: random.Random, most: int = 60) -> str:
    return " + ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(1, most)))


def prepared_of(
    folder: Any, method: str, rows: list[dict], *, samples: bool, **options: Any
) -> tuple[Dataset, FakeRun]:
    always = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "max_length": None, **options}
    config = getattr(lowtide, f"{method}Config")(**always)
    tokenizer = make_tokenizer()
    described = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    run = FakeRun(
        method_of(config), config, described, Dataset.from_list(rows), processing_class=tokenizer, samples=samples
    )
    run.assembled(device_named("cpu"))
    return run.dataset, run


def heaviest(rows: Dataset, budget: int | None = None) -> int:
    lengths = row_lengths(rows)
    return max(int(lengths[chosen].sum()) for chosen in heaviest_rows(lengths, 8, budget))


def test_the_heaviest_micro_batches_are_those_of_all_rows(tmp_path):
    rng = random.Random(0)
    rows = [{"text": text(rng)} for _ in range(ROWS)]
    whole, run = prepared_of(tmp_path / "whole", "SFT", rows, samples=False)
    assert (len(whole), run.notes) == (ROWS, ())
    more = [*rows, {"text": "1"}]  # another dataset, of which nothing is cached
    some, run = prepared_of(tmp_path / "some", "SFT", more, samples=True)
    assert len(some) == SAMPLE
    assert run.notes == (
        f"lengths are those of {SAMPLE} of the {ROWS + 1:,} rows: the {SAMPLE // 2} with the most text, "
        f"and {SAMPLE // 2} evenly among the others",
    )
    assert heaviest(some) == heaviest(whole)
    budget = int(row_lengths(whole).max()) + 5
    assert heaviest(some, budget) == heaviest(whole, budget)


@pytest.mark.slow
def test_where_the_longest_rows_are_left_out_all_are_prepared(tmp_path):
    rng = random.Random(1)
    rows = [{"prompt": "1 + 1 = ", "chosen": text(rng), "rejected": text(rng) + " + 0"} for _ in range(ROWS)]
    made, run = prepared_of(tmp_path / "some", "Reward", rows, samples=True, max_length=60)
    assert run.notes == ()
    whole, _ = prepared_of(tmp_path / "whole", "Reward", rows, samples=False, max_length=60)
    assert made.to_list() == whole.to_list() != []


def test_packed_rows_are_made_of_all(tmp_path):
    rng = random.Random(2)
    rows = [{"text": text(rng)} for _ in range(ROWS)]
    made, run = prepared_of(tmp_path, "SFT", rows, samples=True, packing=True, max_length=128)
    assert run.notes == ()
    assert int(row_lengths(made).sum()) > 0.9 * 128 * len(made) > 128 * SAMPLE
