"""Answers that are numbers: read as text from CSV files, as they are written there."""

import json

import pytest
from datasets import Dataset

from lowtide.cli.training.adapters import AdapterOptions
from lowtide.cli.training.train import RunOptions, TrainingCommand
from lowtide.data.formats.reading import detect_format
from lowtide.data.formats.samples import TextSample, _tell_of_numbers
from lowtide.data.formats.text_columns import OF_PROMPTS, TEXT_COLUMNS, text_columns
from lowtide.data.sources.load import load_rows
from lowtide.data.sources.mixtures import load_mixture

pytestmark = pytest.mark.usefixtures("datasets_cache")

WRITTEN = ["007", "1.50", "-3", None, "1,000"]
CSV = 'question,answer,label\na,007,1\nb,1.50,0\nc,-3,1\nd,,0\ne,"1,000",1\n'
TSV = "question\tanswer\tlabel\na\t007\t1\nb\t1.50\t0\nc\t-3\t1\nd\t\t0\ne\t1,000\t1\n"


@pytest.mark.parametrize(("name", "text"), [("rows.csv", CSV), ("rows.tsv", TSV)])
@pytest.mark.parametrize("streaming", [False, True])
def test_texts_are_read_as_they_are_written_and_labels_as_numbers(tmp_path, caplog, name, text, streaming):
    (tmp_path / name).write_text(text)
    rows = list(load_rows(tmp_path / name, streaming=streaming))
    assert [row["answer"] for row in rows] == WRITTEN
    assert [row["label"] for row in rows] == [1, 0, 1, 0, 1]
    assert ("the numbers of 'answer' are read as text" in caplog.text) is not streaming


def test_numbers_of_another_name_are_read_by_the_name_that_they_get(tmp_path):
    (tmp_path / "odd.csv").write_text("Q,A,n\na,007,1\n")
    entry = {"path": str(tmp_path / "odd.csv"), "columns": {"prompt": "Q", "completion": "A"}}
    assert load_mixture([entry])["train"][0] == {"prompt": "a", "completion": "007", "n": 1}


@pytest.mark.parametrize(
    ("method", "options", "answer", "score"),
    [
        ("sft", {}, "007", 2.5),
        ("dpo", {}, "007", 2.5),
        ("grpo", {}, 7, 2.5),  # for reward functions
        ("sft", {"dataset_text_field": "score"}, "007", "2.50"),
        ("sequence-classification", {"label_column_name": "answer"}, 7, 2.5),
        ("sequence-classification", {"text_column_names": ["score"]}, "007", "2.50"),
    ],
)
def test_a_run_reads_the_columns_as_text_that_its_method_reads_so(tmp_path, method, options, answer, score):
    (tmp_path / "rows.csv").write_text("prompt,answer,score\na,007,2.50\n")
    given = TrainingCommand(method, options, RunOptions(dataset=str(tmp_path / "rows.csv")), AdapterOptions())
    assert given.load(evaluates=False)[0][0] == {"prompt": "a", "answer": answer, "score": score}


def test_columns_of_texts():
    assert {"answer", "output", "chosen", "summary", "sentence1", "input", "system"} <= TEXT_COLUMNS
    assert not {"label", "labels", "margin", "input_ids", "tools"} & TEXT_COLUMNS
    assert text_columns({}, writes=True) == OF_PROMPTS


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_whole_numbers_of_other_files_are_their_digits_and_said_once(tmp_path, caplog, kind):
    path = tmp_path / f"rows.{kind}"
    table = {"prompt": ["a", "b"], "completion": [7, -12]}
    if kind == "json":
        path.write_text(json.dumps([dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]))
    else:
        Dataset.from_dict(table).to_parquet(path)
    rows = load_rows(path)
    _tell_of_numbers.cache_clear()
    read = detect_format(rows.column_names, chats=False).read
    assert [read(row) for row in rows] == [TextSample("7", prompt="a"), TextSample("-12", prompt="b")]
    assert caplog.text.count("'completion' holds whole numbers") == 1
