"""Labelled words to tokens with labels: alignment, windows, the labels that there are, and rows that cannot be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from lowtide.data.batches.token_rows import IGNORED
from lowtide.data.encode.tagged_rows import owners
from lowtide.data.tags import TagOptions, labels_of, prepare_tags
from tests.support.models.tagging import TAGS, dataset, tokenizer
from tests.support.texts.byte_tokenizer import byte_tokenizer

PIECES = tokenizer()
ROW = {"tokens": ["abc", "d", "ca"], "ner_tags": ["B-PER", "O", "I-LOC"]}
_ = IGNORED


def prepared(rows: Any, **options: Any):
    made = Dataset.from_list(rows) if isinstance(rows, list) else rows
    given = {"labels": TAGS, "max_length": 512, **options}
    return prepare_tags(made, PIECES, TagOptions(**given), batch_size=4)


def test_the_first_piece_of_a_word_has_its_label():
    rows, ledger = prepared([ROW])
    assert PIECES.convert_ids_to_tokens(rows[0]["input_ids"]) == ["[CLS]", "a", "##b", "##c", "d", "c", "##a", "[SEP]"]
    assert rows[0]["labels"] == [_, 1, _, _, 0, 4, _, _]
    assert rows[0]["words"] == [-1, 0, -1, -1, 1, 2, -1, -1]
    assert (ledger.tokens, ledger.scored_tokens) == (8, 3)
    assert ledger.scored_by_label == {"O": 1, "B-PER": 1, "I-PER": 0, "B-LOC": 0, "I-LOC": 1}


def test_all_pieces_have_it_with_label_all_tokens():
    rows, ledger = prepared([ROW], label_all_tokens=True)
    assert rows[0]["labels"] == [_, 1, 2, 2, 0, 4, 4, _]
    assert rows[0]["words"] == [-1, 0, -1, -1, 1, 2, -1, -1]
    assert ledger.scored_tokens == 6


def test_numbers_are_read_by_the_names_that_the_dataset_gives_them():
    names = ["B-PER", "O", "I-LOC"]
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    made = Dataset.from_list([{**ROW, "ner_tags": [0, 1, 2]}], features)
    assert labels_of(made, None, None) == ("B-PER", "O", "I-LOC")
    assert prepared(made)[0][0]["labels"] == [_, 1, _, _, 0, 4, _, _]


def test_labels_are_found_in_the_rows():
    rows = [ROW, {"tokens": ["a"], "ner_tags": ["B-LOC"]}]
    assert labels_of(Dataset.from_list(rows), None, None) == ("B-LOC", "B-PER", "I-LOC", "O")
    numbers = Dataset.from_list([{"words": ["a", "b"], "tags": [0, 3]}])
    assert labels_of(numbers, None, None) == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")


def test_a_word_can_be_left_out():
    rows, _ledger = prepared([{"tokens": ["a", "b"], "ner_tags": [IGNORED, 3]}])
    assert rows[0]["labels"] == [_, _, 3, _]


def test_token_ids_are_taken_as_they_are():
    rows, ledger = prepared(
        [{"input_ids": [1, 4, 6, 2, 0], "labels": [_, 1, 0, _, _], "attention_mask": [1, 1, 1, 1, 0]}], max_length=3
    )
    assert rows[0]["input_ids"] == [1, 4, 6]
    assert rows[0]["labels"] == [_, 1, 0]
    assert ledger.tokens_cut == 1


@pytest.mark.parametrize("stride", [0, 1, 5, None])
def test_windows_score_each_token_once(stride: int | None):
    made = dataset(30, longest=40)
    whole, all_of_it = prepared(made)
    rows, ledger = prepared(made, max_length=16, stride=stride)
    assert len(rows) > len(whole)
    assert ledger.scored_by_label == all_of_it.scored_by_label
    assert max(map(len, rows["input_ids"])) == 16
    found: dict[tuple[int, int], int] = {}
    for row in rows:
        for label, word in zip(row["labels"], row["words"], strict=True):
            assert (label == IGNORED) == (word < 0)
            if word >= 0:
                assert (row["document"], word) not in found
                found[row["document"], word] = label
    expected = {
        (row["document"], word): label
        for row in whole
        for label, word in zip(row["labels"], row["words"], strict=True)
        if word >= 0
    }
    assert found == expected


def test_windows_of_all_tokens_score_each_once():
    made = dataset(30, longest=40)
    whole = prepared(made, label_all_tokens=True)[1]
    ledger = prepared(made, label_all_tokens=True, max_length=13, stride=4)[1]
    assert ledger.scored_by_label == whole.scored_by_label


def test_a_token_is_scored_where_it_has_most_context():
    assert owners([0, 6], [10, 8]).tolist() == [0] * 8 + [1] * 6  # the windows share places 6 to 9
    assert owners([0], [3]).tolist() == [0, 0, 0]
    starts, sizes = [0, 3, 6], [9, 9, 8]
    nearest = [
        int(
            np.argmax(
                [
                    min(p - a if a else 99, a + n - 1 - p if k < 2 else 99) if a <= p < a + n else -1
                    for k, (a, n) in enumerate(zip(starts, sizes, strict=True))
                ]
            )
        )
        for p in range(14)
    ]
    assert owners(starts, sizes).tolist() == nearest


def test_long_rows_can_be_cut():
    made = dataset(30, longest=40)
    whole, all_of_it = prepared(made)
    rows, ledger = prepared(made, max_length=16, long_rows="cut")
    assert len(rows) == len(whole)
    assert ledger.tokens + ledger.tokens_cut == all_of_it.tokens
    theirs = PIECES(list(made["tokens"]), is_split_into_words=True, truncation=True, max_length=16)["input_ids"]
    assert rows["input_ids"] == theirs


def test_words_keep_their_spaces_in_tokenizers_of_bytes():
    rows = Dataset.from_list([{"tokens": ["ab", "c"], "ner_tags": ["O", "B-PER"]}])
    bytes_of = byte_tokenizer()
    found = prepare_tags(rows, bytes_of, TagOptions(labels=TAGS), batch_size=1)[0][0]
    assert bytes_of.decode(found["input_ids"]) == " ab c"
    assert found["labels"] == [0, _, _, 1, _]


def test_streams_are_prepared_alike():
    made = dataset(12, longest=30)
    stream, ledger = prepare_tags(
        made.to_iterable_dataset(), PIECES, TagOptions(labels=TAGS, max_length=16), batch_size=4
    )
    assert ledger is None
    assert list(stream) == list(prepared(made, max_length=16)[0])


def test_the_tokenizer_is_not_changed():
    before = PIECES.backend_tokenizer.to_str()
    prepared(dataset(4), max_length=8)
    assert PIECES.backend_tokenizer.to_str() == before


BAD: dict[str, tuple[list[dict], dict, str]] = {
    "counts": ([{"tokens": ["a", "b"], "ner_tags": [0]}], {}, r"row 0 .*'tokens' has 2 words and 'ner_tags' 1 labels"),
    "beyond": (
        [{"tokens": ["a"], "ner_tags": [9]}],
        {},
        r"row 0 .*ner_tags\[0\] is 9, which is not among the model's 5",
    ),
    "unknown": ([{"tokens": ["a"], "ner_tags": ["B-ORG"]}], {}, r"'B-ORG', which is not among the model's 5 labels"),
    "no words": ([{"tokens": "a b", "ner_tags": [0]}], {}, r"'tokens' is .*it must be a list of words"),
    "no labels": ([{"tokens": ["a"], "ner_tags": None}], {}, r"'ner_tags' is .*it must be a list of labels"),
    "no column": ([{"text": ["a"], "ner_tags": [0]}], {}, r"no column of words .*text_column_name"),
    "wrong column": (
        [{"tokens": ["a"], "ner_tags": [0]}],
        {"label_column_name": "x"},
        r"no column 'x', which label_col",
    ),
    "stride": (
        [{"tokens": ["a"], "ner_tags": [0]}],
        {"max_length": 8, "stride": 6},
        r"stride=6 is not below the 6 places",
    ),
    "nothing": ([{"tokens": ["a"], "ner_tags": [IGNORED]}], {}, r"nothing to train on.*no scored token: 1"),
    "token id": ([{"input_ids": [999], "labels": [0]}], {}, r"token id 999 is none of the model's"),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_cannot_be_used_are_named(case: str):
    rows, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        prepared(rows, **options)


def test_a_tokenizer_that_does_not_know_its_words_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(PIECES), "is_fast", property(lambda self: False))
    with pytest.raises(ValueError, match="does not say which word a token is of"):
        prepared([ROW])


def test_the_labels_of_a_stream_are_not_known():
    rows = Dataset.from_list([ROW]).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"is a stream, whose labels are not known.*tag_names"):
        labels_of(rows, None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_row_without_words_says_nothing_of_the_labels(stream):
    rows = Dataset.from_list([{"tokens": [], "ner_tags": []}, ROW])
    found, _ledger = prepared(rows.to_iterable_dataset() if stream else rows)
    assert [row["labels"] for row in found] == [[_, 1, _, _, 0, 4, _, _]]


@pytest.mark.parametrize("first", [None, [None, None, None]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_first_row_without_labels_is_named_with_its_column(first, stream):
    rows = Dataset.from_list([{**ROW, "ner_tags": first}, ROW])
    with pytest.raises(ValueError, match=r"row 0 .*: (ner_tags\[0\]|'ner_tags') is (null|None)"):
        list(prepared(rows.to_iterable_dataset() if stream else rows)[0])
    with pytest.raises(ValueError, match=r"row 0 .*: 'tokens' has 3 words and 'ner_tags' 0 labels"):
        prepared([{**ROW, "ner_tags": []}, ROW])


@pytest.mark.parametrize("lost", ["", " "])
def test_words_without_tokens_are_warned_of(lost: str, caplog):
    prepared([{"tokens": ["ice", "tea"], "ner_tags": [0, 0]}])
    prepared([{"tokens": ["ice", lost, "tea"], "ner_tags": [0, IGNORED, 0]}])
    assert "no token" not in caplog.text
    prepared([{"tokens": ["ice"], "ner_tags": [0]}, {"tokens": ["ice", lost, "tea"], "ner_tags": [0, 0, 0]}])
    assert "in 1 of 2 rows (the first is row 1) a word with a label is empty" in caplog.text
