"""A sample of rows: which it takes, when it is taken, and under which numbers its rows are prepared."""

from __future__ import annotations

import itertools

import pytest
from datasets import Dataset

from lowtide.data.options import PrepareOptions
from lowtide.data.prepare import prepare
from lowtide.data.sources.sampling import sampled_rows, sampling

ROWS = 400


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def texts(count: int = ROWS) -> list[str]:
    """Of lengths in no order, the longest in the middle."""
    return ["word " * (1 + (number * 37) % count) for number in range(count)]


@pytest.mark.parametrize("nested", [False, True])
def test_the_longest_rows_are_taken_and_others_evenly(nested):
    lengths = [len(text) for text in texts()]
    rows = Dataset.from_list(
        [{"a": message(text) if nested else text, "b": number} for number, text in enumerate(texts())]
    )
    rows = rows.select(range(10, ROWS))  # an index that is not the table's own
    with sampling(40) as sample:
        chosen = sampled_rows(rows)
    assert chosen is not None
    kept = sorted((lengths[10 + number] for number in chosen), reverse=True)
    assert kept[:20] == sorted(lengths[10:], reverse=True)[:20]
    others = kept[20:]
    assert max(one - other for one, other in itertools.pairwise(others)) < 2.5 * max(lengths) / 20
    assert (sample.rows, sample.taken) == (ROWS - 10, len(chosen))
    assert "40 of the 390 rows" in str(sample)


def test_tokens_are_counted_where_rows_are_tokenized():
    rows = Dataset.from_list([{"input_ids": [1] * (1 + number % 50)} for number in range(ROWS)])
    with sampling(20):
        chosen = sampled_rows(rows)
    assert chosen is not None
    assert sum(number % 50 == 49 for number in chosen) >= ROWS // 50


def test_small_datasets_and_training_take_all():
    rows = Dataset.from_list([{"text": text} for text in texts()])
    assert sampled_rows(rows) is None
    with sampling(ROWS) as sample:
        assert sampled_rows(rows) is None
    assert sample.taken == 0


def test_what_is_prepared_already_is_taken_whole(tokenizer, datasets_cache):
    rows = Dataset.from_list([{"text": text} for text in texts()])

    def prepared() -> Dataset:
        found, _ = prepare(rows, tokenizer, PrepareOptions(max_length=None), batch_size=8, packing=False)
        assert isinstance(found, Dataset)
        return found

    with sampling(40) as sample:
        assert len(prepared()) == sample.taken == 40
    assert len(prepared()) == ROWS
    with sampling(40) as sample:
        assert len(prepared()) == ROWS
    assert sample.taken == 0


def test_a_row_that_is_wrong_is_named_by_its_number_in_the_dataset(tokenizer, datasets_cache):
    rows = [{"text": text} for text in texts(300)] + [{"text": None}] * 100
    with sampling(40), pytest.raises(ValueError, match=r"row 3\d\d"):
        prepare(Dataset.from_list(rows), tokenizer, PrepareOptions(), batch_size=8, packing=False)
