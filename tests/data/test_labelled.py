"""Texts with labels to token rows: their columns, kinds of labels, limits on length, and rows that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value, load_dataset

from lowtide.data.formats.columns import warn_of_unused
from lowtide.data.formats.labels import names_of_found
from lowtide.data.labelled import LabelOptions, found_labels, prepare_labelled
from tests.support.models.classifying import tokenizer

SINGLE, MULTIPLE, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
PIECES = tokenizer()


def prepared(rows: Any, labels: tuple[str, ...] = ("cold", "hot"), problem: str = SINGLE, **options: Any):
    made = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    given = {"labels": labels, "problem": problem, "max_length": 512, **options}
    return prepare_labelled(made, PIECES, LabelOptions(**given), batch_size=4)


def test_a_text_and_its_class():
    rows, ledger = prepared([{"text": "ice and snow", "label": "cold"}, {"text": "lava", "label": "hot"}])
    assert PIECES.convert_ids_to_tokens(rows[0]["input_ids"]) == ["[CLS]", "ice", "and", "snow", "[SEP]"]
    assert rows["text_label"][:] == [0, 1]
    assert rows["number"][:] == [0, 1]
    assert rows.column_names == ["input_ids", "text_label", "number"]
    assert (ledger.tokens, ledger.scored_tokens) == (8, 2)
    assert ledger.scored_by_label == {"cold": 1, "hot": 1}


@pytest.mark.parametrize(
    "names",
    [("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question1", "question2")],
)
def test_pairs_are_known_by_their_columns(names: tuple[str, str]):
    rows, ledger = prepared([{names[0]: "ice", names[1]: "snow tea", "label": 1}], ("a", "b"))
    assert PIECES.convert_ids_to_tokens(rows[0]["input_ids"]) == ["[CLS]", "ice", "[SEP]", "snow", "tea", "[SEP]"]
    assert rows[0]["second_text"] == 3
    assert f"{names[0]}, {names[1]}" in ledger.read_as


def test_columns_can_be_named():
    options = {"text_column_names": ("a", "b"), "label_column_name": "c"}
    rows, _ = prepared([{"text": "x", "a": "ice", "b": "snow", "c": 1, "label": 0}], **options)
    assert (len(rows[0]["input_ids"]), rows[0]["text_label"]) == (5, 1)


def test_columns_that_are_not_read_are_named(caplog):
    warn_of_unused.cache_clear()
    rows, _ = prepared([{"text": "ice", "label": 0, "labels": 1}])
    assert rows["text_label"][:] == [0]
    assert "rows are read from the columns 'text', 'label'; not used: 'labels'." in caplog.text


def test_what_is_too_long_is_cut_as_by_the_tokenizer():
    rows, ledger = prepared([{"premise": "ice snow frost tea", "hypothesis": "lava fire", "label": 0}], max_length=7)
    expected = PIECES("ice snow frost tea", "lava fire", truncation=True, max_length=7)
    assert rows[0]["input_ids"] == expected["input_ids"]
    assert rows[0]["second_text"] == expected["token_type_ids"].index(1)
    assert (ledger.tokens_cut, ledger.rows_cut) == (2, 1)


def test_token_ids_can_be_given():
    rows, ledger = prepared([{"input_ids": [1, 4, 2, 0], "attention_mask": [1, 1, 1, 0], "label": 1}], max_length=2)
    assert (rows[0]["input_ids"], rows[0]["text_label"], ledger.tokens_cut) == ([1, 4], 1, 1)


def column(label: list, kind: Any = None) -> Dataset:
    rows = [{"text": "ice", "label": each} for each in label]
    return Dataset.from_list(rows, None if kind is None else Features({"text": Value("string"), "label": kind}))


NAMES = ClassLabel(names=["hot", "cold"])
KINDS: dict[str, tuple[Dataset, tuple[str, ...], str, list]] = {
    "texts": (column(["b", "a"]), ("a", "b"), SINGLE, [1, 0]),
    "numbers": (column([2, 0]), ("LABEL_0", "LABEL_1", "LABEL_2"), SINGLE, [2, 0]),
    "yes and no": (column([True, False]), ("LABEL_0", "LABEL_1"), SINGLE, [1, 0]),
    "named numbers": (column([0, 1], NAMES), ("hot", "cold"), SINGLE, [0, 1]),
    "values": (column([0.5, 2.0]), ("LABEL_0",), REGRESSION, [0.5, 2.0]),
    "several values of 0 and 1": (column([[0.0, 1.0], [1.0, 1.0]]), ("LABEL_0", "LABEL_1"), MULTIPLE, [[0, 1], [1, 1]]),
    "whole numbers of 0 and 1": (column([[0, 1], [1, 1]]), ("LABEL_0", "LABEL_1"), MULTIPLE, [[0, 1], [1, 1]]),
    "lists of numbers": (column([[2], [0, 1]]), ("LABEL_0", "LABEL_1", "LABEL_2"), MULTIPLE, [[0, 0, 1], [1, 1, 0]]),
    "lists of texts": (column([["b"], ["a", "c"]]), ("a", "b", "c"), MULTIPLE, [[0, 1, 0], [1, 0, 1]]),
    "lists of named numbers": (column([[1], []], List(NAMES)), ("hot", "cold"), MULTIPLE, [[0, 1], [0, 0]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_told_as_by_transformers(kind: str):
    dataset, names, problem, expected = KINDS[kind]
    found = found_labels(dataset, None, None)
    assert (found.names, found.problem) == (names, problem)
    rows, ledger = prepared(dataset, names, problem)
    assert rows["text_label"][:] == expected
    assert (ledger.scored_by_label is None) == (problem == REGRESSION)


def test_whole_numbers_are_values_where_that_is_asked_for():
    dataset = column([3, 5])
    assert found_labels(dataset, None, None, problem=REGRESSION).names == ("LABEL_0",)
    assert prepared(dataset, ("LABEL_0",), REGRESSION)[0]["text_label"][:] == [3.0, 5.0]


def test_a_models_own_order_of_labels_is_kept():
    assert prepared(column([0, 1], NAMES), ("cold", "hot"))[0]["text_label"][:] == [1, 0]


def test_rows_that_are_prepared_are_known_again():
    rows, _ = prepared([{"premise": "ice", "hypothesis": "tea", "label": 0}])
    found = found_labels(rows, None, None)
    assert (found.names, found.problem) == (("LABEL_0", "LABEL_1"), SINGLE)


BAD_ROWS: dict[str, tuple[list[dict], str, str]] = {
    "missing": (
        [{"text": "ice", "label": 0}, {"text": "tea", "label": None}],
        SINGLE,
        r"row 1 \(the first is 0\): 'label' is missing: give the row a label, or remove it",
    ),
    "beyond": ([{"text": "ice", "label": 5}], SINGLE, r"row 0 .*label is 5, which is not among the model's 2 labels"),
    "unknown": (
        [{"text": "ice", "label": "mild"}],
        SINGLE,
        r"row 0 .*'mild', which is not among .*cold, hot.*class_n",
    ),
    "in a list": ([{"text": "ice", "label": ["hot", "mild"]}], MULTIPLE, r"row 0 .*label\[1\] is 'mild', which is not"),
    "empty": (
        [{"text": "ice", "label": 0}, {"text": " ", "label": 1}],
        SINGLE,
        r"row 1 .*'text' is empty: remove",
    ),
    "no text": ([{"text": "ice", "label": 0}, {"text": None, "label": 1}], SINGLE, r"row 1 .*it must be a string"),
    "second": ([{"premise": "ice", "hypothesis": "", "label": 0}], SINGLE, r"row 0 .*'hypothesis' is empty"),
    "length": ([{"text": "ice", "label": [0.0, 1.0, 1.0]}], MULTIPLE, r"row 0 .*has 3 numbers, and the model gives 2"),
    "share": (
        [{"text": "ice", "label": [0.5, 1.0]}],
        MULTIPLE,
        r"row 0 .*label\[0\] is 0\.5; of each class a row",
    ),
    "infinite": (
        [{"text": "ice", "label": [1.0, float("inf")]}],
        REGRESSION,
        r"row 0 .*label\[1\] is inf, which is",
    ),
    "tokens": ([{"input_ids": [1, 99], "label": 0}], SINGLE, r"row 0 .*token id 99 is none of the model's 18"),
    "no tokens": ([{"input_ids": [], "label": 0}, {"input_ids": [1], "label": 0}], SINGLE, r"row 0 .*has no tokens"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_named(case: str):
    rows, problem, message = BAD_ROWS[case]
    with pytest.raises(ValueError, match=message):
        prepared(rows, problem=problem)


def test_datasets_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match=r"no column of texts .*its columns are 'body', 'label'; name it by text_"):
        found_labels(Dataset.from_list([{"body": "ice", "label": 0}]), None, None)
    with pytest.raises(ValueError, match=r"no column of labels .*name it by label_column_name"):
        found_labels(Dataset.from_list([{"text": "ice"}]), None, None)
    with pytest.raises(ValueError, match=r"all rows of .* have the same label \(a\).*class_names.*'regression'"):
        found_labels(column(["a", "a"]), None, None)
    with pytest.raises(ValueError, match=r"problem_type='regression' does not fit the labels of .*string values"):
        found_labels(column(["a", "b"]), None, None, problem=REGRESSION)
    with pytest.raises(ValueError, match=r"holds null values; labels are texts, numbers, or lists"):
        found_labels(column([None, None]), None, None)


def test_labels_of_several_kinds_in_a_file_are_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "ice", "label": "cold"}\n{"text": "fire", "label": 0.5}\n')
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="holds values of several kinds; labels are texts, numbers, or lists"):
        found_labels(rows, None, None)


def test_a_number_that_is_no_label_s_is_refused_before_as_many_are_named():
    with pytest.raises(ValueError, match=f"the rows have the label {2**40}, and labels are numbered from 0 on"):
        names_of_found({0, 1, 2**40})


def test_a_limit_without_a_place_for_the_text_is_refused():
    rows = [{"text": "ice", "label": "cold"}, {"text": "lava fire", "label": "hot"}]
    for most in (1, 2):
        with pytest.raises(ValueError, match=f"max_length={most} leaves 0 places beside the 2 special tokens"):
            prepared(rows, max_length=most)
    with pytest.raises(ValueError, match="2 texts of a row need one each"):
        prepared([{"premise": "ice", "hypothesis": "tea", "label": 0}], max_length=4)


def test_a_limit_of_one_token_is_warned_of(caplog):
    rows, _ = prepared([{"text": "ice", "label": "cold"}, {"text": "lava fire", "label": "hot"}], max_length=3)
    assert [len(each) for each in rows["input_ids"]] == [3, 3]
    assert "max_length=3 keeps one token of a text" in caplog.text


def test_labels_that_no_row_has_are_warned_of(caplog):
    rows = [{"text": "ice", "label": "cold"}, {"text": "lava", "label": "hot"}]
    prepared(rows)
    assert "nothing has" not in caplog.text
    prepared(rows, ("cold", "mild", "hot"))
    assert "nothing has 1 of the 3 labels (mild)" in caplog.text


def test_a_mask_that_hides_tokens_is_warned_of(caplog):
    padding = PIECES.pad_token_id
    row = {"input_ids": [5, 6, 7, padding], "attention_mask": [1, 1, 1, 0], "label": 0}
    rows, _ = prepared([row, {**row, "label": 1}])
    assert rows["input_ids"][0] == [5, 6, 7]
    assert "attention_mask" not in caplog.text
    rows, _ = prepared([row, {**row, "attention_mask": [1, 1, 0, 0], "label": 1}])
    assert rows["input_ids"][1] == [5, 6]
    assert "in 1 of 2 rows (the first is row 1) 'attention_mask' leaves out tokens" in caplog.text
