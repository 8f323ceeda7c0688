"""Several datasets as one: TRL's shares, columns and splits, and what is said of entries that can't be used."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset

from lowtide.data.sources.load import load_rows
from lowtide.data.sources.mixtures import DatasetConfig, load_mixture, split_off
from lowtide.data.sources.titles import title_of


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    """A file of 10 rows and one of 4, with other columns beside `text`."""
    for name, count, other in (("a", 10, "source"), ("b", 4, "score")):
        rows = [{"text": f"{name}{n}", other: n} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")


def texts(rows) -> list[str]:
    return [row["text"] for row in rows]


def with_columns(files, **more) -> list[dict]:
    return [{"path": path, "columns": ["text"], **more} for path in files]


def test_without_shares_the_datasets_stand_one_after_the_other(files):
    mixture = load_mixture(with_columns(files))
    assert list(mixture) == ["train"]
    assert mixture["train"].column_names == ["text"]
    assert texts(mixture["train"]) == [f"a{n}" for n in range(10)] + [f"b{n}" for n in range(4)]


def test_shares_are_those_of_trl(files):
    utils = pytest.importorskip("trl.scripts.utils")
    splits = [
        {"data_files": path, "columns": ["text"], "fraction": share} for path, share in zip(files, (3, 1), strict=True)
    ]
    theirs = utils.get_dataset(
        utils.DatasetMixtureConfig(datasets=[utils.DatasetConfig(path="json", **each) for each in splits])
    )
    ours = load_mixture([{"path": "json", **each} for each in splits])
    assert texts(ours["train"]) == texts(theirs["train"])
    assert len(ours["train"]) == 13  # 10 of 3/4 allow 13.3 rows


@dataclass
class Entry:
    path: str
    weight: float


def test_an_entry_is_a_path_a_mapping_or_an_object(files):
    a, b = files
    assert texts(load_mixture([a])["train"]) == texts(load_mixture([{"path": a}])["train"])
    assert texts(load_mixture([Entry(a, 1), Entry(b, 1)])["train"]) == texts(
        load_mixture([DatasetConfig(a, fraction=0.5), {"path": b, "weight": 0.5}])["train"]
    )


def test_a_test_split_is_the_same_on_every_rank(files):
    one, other = (load_mixture(with_columns(files), test_split_size=0.25) for _ in range(2))
    assert (len(one["train"]), len(one["test"])) == (10, 4)
    assert texts(one["test"]) == texts(other["test"])
    assert sorted(texts(one["train"]) + texts(one["test"])) == sorted(texts(load_mixture(with_columns(files))["train"]))


def test_rows_are_taken_out_of_one_dataset_as_out_of_a_mixture(files):
    rows = load_rows(files[0])
    mixture, alone = load_mixture(files[:1], test_split_size=0.25), split_off(rows, 0.25)
    assert {name: texts(part) for name, part in alone.items()} == {name: texts(part) for name, part in mixture.items()}
    assert texts(split_off(rows, 3.0)["test"]) == texts(split_off(rows, 3)["test"])  # as the command reads a number
    assert len(split_off(rows, 3)["test"]) == 3
    assert title_of(alone["test"], "test") == title_of(rows, "train") == files[0]


def test_streams_are_drawn_from_by_their_shares_and_no_row_twice(files):
    entries = [{**each, "fraction": share} for each, share in zip(with_columns(files), (3, 1), strict=True)]
    stream = load_mixture(entries, streaming=True)["train"]
    assert isinstance(stream, IterableDataset)
    drawn = texts(stream)
    assert len(set(drawn)) == len(drawn)
    assert {text[0] for text in drawn} == {"a", "b"}
    assert texts(stream) == drawn


def test_streams_one_after_the_other_are_warned_of(files, caplog):
    assert len(texts(load_mixture(with_columns(files), streaming=True)["train"])) == 14
    assert "one after the other" in caplog.text


def test_columns_that_only_some_have_are_named(files, caplog):
    rows = load_mixture(files)["train"]
    assert set(rows.column_names) == {"text", "source", "score"}
    assert "without 'score', 'source' hold null" in caplog.text


def test_a_folder_in_memory_of_datasets_and_a_slice_of_a_split(files, tmp_path):
    Dataset.from_dict({"text": ["x", "y", "z"]}).save_to_disk(tmp_path / "saved")
    mixture = load_mixture([str(tmp_path / "saved"), {"path": files[0], "split": "train[:2]", "columns": ["text"]}])
    assert texts(mixture["train"]) == ["x", "y", "z", "a0", "a1"]


WRONG = {
    "`datasets` is empty": [],
    r"datasets\[0\] has the key 'colums'; did you mean 'columns'": [{"path": "A", "colums": ["text"]}],
    r"datasets\[0\] has no `path`": [{"name": "x"}],
    r"datasets\[0\] is a int": [3],
    r"datasets\[0\]: columns is 'text'; it must be a list": [{"path": "A", "columns": "text"}],
    r"datasets\[0\]: .*a.jsonl has no column 'txt'; did you mean 'text'": [{"path": "A", "columns": ["txt"]}],
    r"datasets\[1\] has no `fraction`": [{"path": "A", "fraction": 1}, {"path": "A"}],
    r"datasets\[0\]: fraction is -1": [{"path": "A", "fraction": -1}],
    r"datasets\[0\]: fraction is nan": [{"path": "A", "fraction": float("nan")}],
    "every `fraction`": [{"path": "A", "fraction": 0}],
}


@pytest.mark.parametrize("message", WRONG)
def test_entries_that_cannot_be_used(files, message):
    entries = [{**e, "path": files[0]} if isinstance(e, dict) and e.get("path") == "A" else e for e in WRONG[message]]
    with pytest.raises(ValueError, match=message):
        load_mixture(entries)


def test_columns_of_different_kinds_cannot_be_put_together(files, tmp_path):
    path = Path(tmp_path, "c.jsonl")
    path.write_text('{"text": ["a", "list"]}\n')
    with pytest.raises(ValueError, match="can't be put together"):
        load_mixture([{"path": files[0], "columns": ["text"]}, str(path)])


def test_a_stream_cannot_be_split(files):
    with pytest.raises(ValueError, match=r"test_split_size=0.5 needs the number of rows"):
        load_mixture([files[0]], streaming=True, test_split_size=0.5)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_mixture([str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(FileNotFoundError, match="gone"):
        load_mixture([{"path": "json", "data_files": str(tmp_path / "gone.jsonl")}])


@pytest.mark.parametrize("size", [500, -0.5])
def test_rows_to_evaluate_on_that_cannot_be_taken_are_refused_by_their_option(size, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 4)
    with pytest.raises(ValueError, match=f"test_split_size={size} cannot be taken from 4 rows"):
        load_mixture([str(path)], test_split_size=size)
