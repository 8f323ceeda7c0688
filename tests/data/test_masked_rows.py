"""Rows of masked language models, as they are prepared: special tokens, words, cutting, packing, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from lowtide.data.encode.masked import MaskedEncoder, MaskedOptions
from lowtide.data.prepare import prepare
from tests.support.models.masked_texts import CLS, MASK, SEP, texts, tokenizer


def prepared(rows: Any, *, packing: bool = False, **options: Any) -> tuple[Any, Any]:
    found = prepare(
        rows, tokenizer(), MaskedOptions(**options), batch_size=4, packing=packing, encoder_of=MaskedEncoder
    )
    return found


def test_special_tokens_have_no_label():
    rows, ledger = prepared(Dataset.from_list([{"text": "tides boat [MASK] gulls"}]))
    row = rows[0]
    assert row["input_ids"] == tokenizer()("tides boat [MASK] gulls")["input_ids"]
    assert [t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100] == [CLS, MASK, SEP]
    assert all(label in (token, -100) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    assert ledger.scored_tokens == 5


def test_words_are_those_of_the_tokenizer():
    rows, _ = prepared(Dataset.from_list([{"text": "tides boat gulls"}]), words=True)
    assert rows[0]["words"] == [-1, 0, 0, 1, 2, 2, -1]


def test_a_row_is_cut_as_the_tokenizer_cuts():
    data = texts(20)
    rows, ledger = prepared(data, max_length=12, words=True)
    cut = tokenizer()(list(data["text"]), truncation=True, max_length=12)["input_ids"]
    whole = tokenizer()(list(data["text"]))["input_ids"]
    assert list(rows["input_ids"]) == cut != whole
    assert all(len(row["words"]) == len(row["labels"]) == len(row["input_ids"]) for row in rows)
    assert ledger.tokens_cut == sum(map(len, whole)) - sum(map(len, cut))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_hold_every_text_with_its_labels_and_words(strategy: str, stream: bool):
    data = texts(40)
    source = data.to_iterable_dataset() if stream else data
    rows, _ = prepared(source, packing=True, max_length=24, packing_strategy=strategy, words=True)
    rows = list(rows)
    plain, _ = prepared(data, words=True, max_length=24 if strategy == "bfd" else None)
    pieces = []
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) == len(row["words"]) <= 24
        start = 0
        for length in row["seq_lengths"]:
            pieces.append([(row[name][start : start + length]) for name in ("input_ids", "labels", "words")])
            start += length
    if strategy == "bfd":
        assert sorted(pieces) == sorted([row["input_ids"], row["labels"], row["words"]] for row in plain)
    tokens = sum(len(piece[0]) for piece in pieces)
    assert tokens == sum(len(row["input_ids"]) for row in plain)
    scored = sum(label != -100 for piece in pieces for label in piece[1])
    assert scored == sum(label != -100 for row in plain for label in row["labels"]), "the first of a piece counts too"
    assert len({row["number"] for row in rows}) == len(rows)


def test_rows_are_numbered_as_in_the_dataset():
    data = Dataset.from_list([{"text": "tide"}, {"text": ""}, {"text": "boat"}, {"text": "gulls sand"}])
    rows, ledger = prepared(data)
    assert list(rows["number"]) == [0, 2, 3]
    assert sum(ledger.rows_dropped.values()) == 1


def test_tokenized_rows_lose_padding_and_what_the_mask_calls_special():
    row = {
        "input_ids": [CLS, 5, 6, 7, SEP, 0],
        "special_tokens_mask": [1, 0, 1, 0, 1, 1],
        "attention_mask": [1, 1, 1, 1, 1, 0],
        "word_ids": [None, 0, 0, 1, None, None],
    }
    rows, _ = prepared(Dataset.from_list([row]), words=True)
    assert rows[0]["input_ids"] == [CLS, 5, 6, 7, SEP]
    assert rows[0]["labels"] == [-100, 5, -100, 7, -100]
    assert rows[0]["words"] == [-1, 0, 0, 1, -1]


def test_labels_that_are_given_are_taken():
    row = {"input_ids": [CLS, MASK, 6, SEP], "labels": [-100, 5, -100, -100]}
    rows, _ = prepared(Dataset.from_list([row]))
    assert rows[0] == {**row, "number": -1}


BAD = {
    "no text": ([{"words": "tide"}], {}, "neither 'text' .* nor 'input_ids'"),
    "text is a list": ([{"text": "tide"}, {"text": None}], {}, r"row 1 .*'text' is null; it must be a string"),
    "lengths differ": ([{"input_ids": [2, 5], "special_tokens_mask": [1]}], {}, "must be as long as each other"),
    "masks of other numbers": ([{"input_ids": [2, 5], "special_tokens_mask": [1, 7]}], {}, r"special_tokens_mask\[1\]"),
    "words unknown": ([{"input_ids": [2, 5]}], {"words": True}, "does not say which tokens make a word"),
    "outside the vocabulary": ([{"input_ids": [2, 500]}], {}, "outside the vocabulary"),
    "images": ([{"text": "tide", "images": ["a"]}], {}, "images"),
    "nothing to mask": ([{"text": ""}], {}, "nothing to train on"),
    "packed already": ([{"input_ids": [2, 5], "seq_lengths": [2]}], {}, "is packed already"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name: str):
    rows, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        prepared(Dataset.from_list(rows), **options)
