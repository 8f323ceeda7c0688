"""Sources with targets to token ids: the columns that are read, what is cut, languages, and the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from lowtide.data.source_target import SourceTargetOptions, prepare_pairs_of_texts
from tests.support.models.pairs_of_texts import END, multilingual, rows, tokenizer

ONE = {"w1 w2": [6, 7, END], "w3": [8, END]}


def prepared(given: Any, **options: Any) -> Any:
    return prepare_pairs_of_texts(given, tokenizer(), SourceTargetOptions(max_length=None, **options), batch_size=2)


def lists(given: Any, **options: Any) -> list[tuple[list[int], list[int]]]:
    found, _ = prepared(given, **options)
    return [(row["source_ids"], row["target_ids"]) for row in found]


FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "source and target": ({"source": "w1 w2", "target": "w3"}, {}),
    "text and summary": ({"text": "w1 w2", "summary": "w3"}, {}),
    "document and summary": ({"document": "w1 w2", "summary": "w3", "id": 7}, {}),
    "columns that are named": ({"q": "w1 w2", "target": "w9", "a": "w3"}, {"source_column": "q", "target_column": "a"}),
    "translation": ({"translation": {"en": "w1 w2", "de": "w3"}}, {"source_lang": "en", "target_lang": "de"}),
    "the other way": ({"translation": {"en": "w3", "de": "w1 w2"}}, {"source_lang": "de", "target_lang": "en"}),
    "prefix": ({"source": "w2", "target": "w3"}, {"source_prefix": "w1 "}),
    "token ids": ({"input_ids": [6, 7, END], "labels": [8, END]}, {}),
    "padded token ids": (
        {"input_ids": [6, 7, END, 0], "attention_mask": [1, 1, 1, 0], "labels": [8, END, -100, -100]},
        {},
    ),
    "prepared": ({"source_ids": [6, 7, END], "target_ids": [8, END]}, {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_columns_that_are_read(name: str):
    row, options = FORMATS[name]
    assert lists(Dataset.from_list([row]), **options) == [(ONE["w1 w2"], ONE["w3"])]


def test_a_stream_is_read_alike():
    given = rows(12)
    assert lists(given.to_iterable_dataset()) == lists(given)


@pytest.mark.parametrize("most", [1, 3, 5, 50])
def test_rows_are_cut_as_their_tokenizer_cuts(most: int):
    given = rows(12)
    made = tokenizer()
    sources, targets = (
        made(list(given[name]), truncation=True, max_length=limit)["input_ids"]
        for name, limit in (("source", most), ("target", 2 * most))
    )
    found = lists(given, max_source_length=most, max_target_length=2 * most)
    assert found == list(zip(sources, targets, strict=True))
    _, ledger = prepared(given, max_source_length=most, max_target_length=2 * most)
    whole = sum(map(len, [*made(list(given["source"]))["input_ids"], *made(list(given["target"]))["input_ids"]]))
    assert ledger.tokens + ledger.tokens_cut == whole
    assert ledger.scored_tokens == sum(map(len, targets))


def test_empty_rows_are_dropped_and_counted():
    given = Dataset.from_list(
        [
            {"source": "w1 w2", "target": "w3"},
            {"source": "", "target": "w3"},
            {"source": "w1", "target": " "},
        ]
    )
    found, ledger = prepared(given)
    assert len(found) == ledger.rows == 1
    assert dict(ledger.rows_dropped) == {"empty source": 1, "empty target": 1}


def test_padding_avoided_is_of_both_sides():
    given = Dataset.from_list(
        [{"source": " ".join(["w1"] * (n - 1)), "target": " ".join(["w2"] * (m - 1))} for n, m in ((9, 2), (3, 6))]
    )
    _, ledger = prepared(given)
    assert ledger.padding_avoided == pytest.approx(1 - (9 + 2 + 3 + 6) / (2 * 9 + 2 * 6))


def test_labels_between_others_may_be_left_unscored():
    row = {"input_ids": [6, END], "labels": [8, -100, 9, END]}
    found, ledger = prepared(Dataset.from_list([row]))
    assert found[0]["target_ids"] == [8, -100, 9, END]
    assert ledger.scored_tokens == 3


def test_a_tokenizer_with_tokens_for_languages_writes_them():
    made = multilingual()
    options = SourceTargetOptions(max_length=None, source_lang="de_DE", target_lang="en_XX", max_source_length=3)
    given = Dataset.from_list([{"source": "w1 w2", "target": "w3"}])
    found, _ = prepare_pairs_of_texts(given, made, options, batch_size=1)
    english, german = (made.get_vocab()[name] for name in ("en_XX", "de_DE"))
    assert found[0] == {"source_ids": [6, END, german], "target_ids": [english, *ONE["w3"]]}
    assert (made.src_lang, made.tgt_lang) == ("en_XX", "en_XX"), "the tokenizer was changed"


def test_a_language_that_the_tokenizer_has_no_token_for_is_refused():
    options = SourceTargetOptions(max_length=None, source_lang="fr_XX", target_lang="en_XX")
    given = Dataset.from_list([{"source": "w1", "target": "w2"}])
    with pytest.raises(ValueError, match="source_lang='fr_XX' is none of the languages of Multilingual"):
        prepare_pairs_of_texts(given, multilingual(), options, batch_size=1)


def test_languages_that_nothing_reads_are_said(caplog: pytest.LogCaptureFixture):
    options = {"source_lang": "de", "target_lang": "en"}
    lists(Dataset.from_list([{"translation": {"en": "w1", "de": "w2"}}]), **options)
    assert "no effect" not in caplog.text
    lists(Dataset.from_list([{"source": "w1", "target": "w2"}]), **options)
    assert "source_lang and target_lang have no effect on " in caplog.text
    assert "writes no tokens of languages" in caplog.text


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a number": ({"source": "w1", "target": False}, {}, r"row 0 \(the first is 0\): 'target' is .* must be a string"),
    "an id beyond the vocabulary": (
        {"input_ids": [6], "labels": [999]},
        {},
        "labels holds 999, outside the vocabulary of 45",
    ),
    "texts for ids": ({"input_ids": ["w1"], "labels": [1]}, {}, "'input_ids' is .*must be a list of token ids"),
    "a column that is not there": (
        {"source": "w1", "target": "w2"},
        {"source_column": "q"},
        "no column 'q'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_cannot_be_read_are_refused(name: str):
    row, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        prepared(Dataset.from_list([row]), **options)
