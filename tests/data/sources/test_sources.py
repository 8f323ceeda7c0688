"""Sources: every kind of place that rows come from, and the message where one can't be read."""

import gzip
import json
import re

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from lowtide.data.sources import load, places
from lowtide.data.sources.load import load_rows
from lowtide.data.sources.places import READS_HERE, check_place, entries

pytestmark = pytest.mark.usefixtures("datasets_cache")

ROWS = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n"


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("lines.json", LINES),
        ("rows.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("blank.jsonl", LINES.replace("\n", "\n\n")),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("rows.csv", "text,n\na,1\nb,2\n"),
        ("rows.tsv", "text\tn\na\t1\nb\t2\n"),
        ("semicolons.csv", "text;n\na;1\nb;2\n"),
        ("tabs.csv", "text\tn\r\na\t1\r\nb\t2\r\n"),
        ("semicolons.csv.gz", gzip.compress(b"text;n\na;1\nb;2\n", mtime=0)),
    ],
)
def test_reads_files(tmp_path, name, content):
    assert list(load_rows(write(tmp_path / name, content))) == ROWS


@pytest.mark.parametrize("streaming", [False, True])
def test_the_separator_of_a_csv_is_told_from_its_first_line_and_said(tmp_path, caplog, streaming):
    given = {"bar": 'text|"a, b"\nx|1\n', "comma": 'text,"a;b"\nx,1\n', "one": 'text\n"a;b"\n'}
    rows = {}
    for name, content in given.items():
        rows[name] = list(load_rows(write(tmp_path / f"{name}.csv", content), streaming=streaming))
    assert rows == {"bar": [{"text": "x", "a, b": 1}], "comma": [{"text": "x", "a;b": 1}], "one": [{"text": "a;b"}]}
    said = [record.getMessage() for record in caplog.records if "separated by" in record.getMessage()]
    assert said == [f"{tmp_path / 'bar.csv'}: the first line has no comma, and columns are separated by '|'"]


@pytest.mark.parametrize("streaming", [False, True])
def test_reads_parquet(tmp_path, streaming):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    assert list(load_rows(tmp_path / "rows.parquet", streaming=streaming)) == ROWS


def test_a_name_with_signs_of_a_pattern_is_read_as_it_is(tmp_path):
    path = tmp_path / "a*b [1]?.jsonl"
    path.write_text('{"text": "one"}\n')
    (tmp_path / "a--b 1x.jsonl").write_text('{"text": "another"}\n')
    assert list(load_rows(path)["text"]) == ["one"]


def test_reads_a_folder_by_split(tmp_path):
    write(tmp_path / "train.jsonl", LINES)
    write(tmp_path / "test.jsonl", '{"text": "c", "n": 3}\n')
    assert list(load_rows(tmp_path)) == ROWS
    assert list(load_rows(str(tmp_path), split="test")) == [{"text": "c", "n": 3}]
    with pytest.raises(ValueError, match='Unknown split "dev"'):
        load_rows(tmp_path, split="dev")


def test_the_folders_own_name_does_not_make_it_a_split(tmp_path):
    folder = tmp_path / "test-train-dev"
    (folder / "val").mkdir(parents=True)
    write(folder / "part-0.jsonl", LINES)
    write(folder / "val" / "0.jsonl", '{"text": "c", "n": 3}\n')
    assert list(load_rows(folder)) == ROWS
    assert list(load_rows(folder, split="validation")) == [{"text": "c", "n": 3}]


def test_a_folder_of_several_kinds_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", LINES)
    write(tmp_path / "a.csv", "text,n\na,1\n")
    with pytest.raises(ValueError, match=r"several kinds \(.csv, .jsonl\)"):
        load_rows(tmp_path)


def test_the_first_two_kinds_of_files_end_the_search(tmp_path, monkeypatch):
    def found(folder):
        yield from (folder / "a.jsonl", folder / "b.csv")
        raise AssertionError("the search goes on")

    write(tmp_path / "a.jsonl", LINES)
    monkeypatch.setattr(load, "readable_files", found)
    with pytest.raises(ValueError, match=r"several kinds \(.csv, .jsonl\): .*a.jsonl, .*b.csv. Name one"):
        load_rows(tmp_path)


def test_a_folder_of_too_many_files_is_not_walked_to_its_end(tmp_path, monkeypatch):
    for number in range(6):
        (tmp_path / f"{number}.png").touch()
    monkeypatch.setattr(places, "MOST_ENTRIES", 5)
    with pytest.raises(ValueError, match=r"holds more than 5 files and folders, too many .*: name the folder or the"):
        load_rows(tmp_path)
    (tmp_path / "0.png").unlink()
    with pytest.raises(FileNotFoundError, match="holds no files that can be read"):
        load_rows(tmp_path)


def test_links_to_folders_are_not_followed(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "above").symlink_to(tmp_path)
    write(tmp_path / "inner" / "a.jsonl", LINES)
    assert sorted(file.name for file in entries(tmp_path)) == ["a.jsonl", "above", "inner"]


def test_a_parquet_file_without_rows(tmp_path):
    Dataset.from_dict({"text": []}).to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"a\.parquet has no rows\."):
        load_rows(tmp_path / "a.parquet")


def test_reads_what_save_to_disk_wrote(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "several")
    assert list(load_rows(tmp_path / "one")) == ROWS
    assert list(load_rows(tmp_path / "several")) == ROWS


def test_gives_datasets_back_as_they_are():
    dataset = Dataset.from_list(ROWS)
    stream = dataset.to_iterable_dataset()
    assert load_rows(dataset) is dataset
    assert load_rows(stream) is stream
    assert load_rows(DatasetDict(train=dataset)) is dataset
    with pytest.raises(ValueError, match="there is no split 'dev'; there are 'train'"):
        load_rows(DatasetDict(train=dataset), split="dev")


def test_reads_a_list_of_dicts_whose_columns_differ():
    assert list(load_rows([{"a": "x"}, {"b": 1}])) == [{"a": "x", "b": None}, {"a": None, "b": 1}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_streams_a_file(tmp_path, name):
    rows = load_rows(write(tmp_path / name, LINES), streaming=True)
    assert isinstance(rows, IterableDataset)
    assert list(rows) == ROWS


def test_streams_the_files_of_a_folder(tmp_path):
    write(tmp_path / "0.jsonl", LINES)
    write(tmp_path / "1.jsonl", LINES)
    assert list(load_rows(tmp_path, streaming=True)) == ROWS * 2


def test_converts_once_and_maps_into_memory(tmp_path, datasets_cache):
    path = write(tmp_path / "rows.jsonl", LINES)
    files = [file["filename"] for file in load_rows(path).cache_files]
    assert files
    assert files == [file["filename"] for file in load_rows(path).cache_files]
    assert all(str(datasets_cache) in file for file in files)


@pytest.mark.parametrize("late", [{"meta": "s"}, {"meta": [{"a": 1}]}])
def test_columns_that_show_late_in_a_long_file_are_read(tmp_path, late):
    """Ten megabytes in, where columns are inferred from."""
    lines = [json.dumps({"text": "a" * 100_000, "meta": None})] * 120 + [json.dumps({"text": "b", **late, "new": 1})]
    rows = load_rows(write(tmp_path / "late.jsonl", "\n".join(lines)))
    assert rows[len(rows) - 1] == {"text": "b", **late, "new": 1}
    assert rows[0]["meta"] is None


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("bad.jsonl", '{"text": "a"}\n{"text" "b"}\n', "bad.jsonl, line 2: not JSON (Expecting ':' delimiter"),
        ("bad.jsonl", '{"text": "a"}\n\n[1]\n', "bad.jsonl, line 3: a JSON list, where each line must be an object"),
        ("null.jsonl", '{"text": "a"}\nnull\n', "null.jsonl, line 2: null, where a row must be an object"),
        ("null.jsonl", 'null\n{"text": "a"}\n', "null.jsonl, line 1: null, where a row must be an object"),
        ("null.jsonl", '{"text": null} null\n', "null.jsonl, line 1: null, where a row must be an object"),
        ("null.json", '[\n{"text": "null", "n": [null]},\nnull]', "null.json, line 3: null, where a row must be"),
        ("null.json", '[null, {"text": "a"}]', "null.json, line 1: null, where a row must be an object"),
        ("zero.jsonl", "\0\n", "zero.jsonl, line 1: not JSON"),
        ("bad.json", '[\n{"text": "a"},\n{"text" "b"}]', "bad.json, line 3: not JSON"),
        ("bad.json", '{"text": "a"}\n{"text" "b"}\n', "bad.json, line 2: not JSON"),
        ("empty.jsonl", "", "empty.jsonl is empty."),
        ("blank.jsonl", "\n\n", "blank.jsonl has no rows."),
        ("header.csv", "text,n\n", "header.csv has no rows."),
        ("bad.csv", "a,b\n1,2\n1,2,3\n", "bad.csv can't be read: Error tokenizing data. C error: Expected 2 fields"),
        ("bad.parquet", "hello", "bad.parquet can't be read: Parquet"),
        ("notes.docx", "hello", "notes.docx: files that end in '.docx' can't be read, only .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, content, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        load_rows(write(tmp_path / name, content))


def test_null_is_a_value_of_a_row(tmp_path):
    rows = [{"text": "a", "more": [None, 1]}, {"text": None, "more": None}]
    for name, content in (
        ("rows.json", json.dumps(rows, indent=1)),
        ("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
    ):
        assert list(load_rows(write(tmp_path / name, content))) == rows


def test_json_lines_that_are_a_list_are_warned_of(tmp_path, caplog):
    rows = load_rows(write(tmp_path / "list.jsonl", '[{"text": "a"}, {"text": "b"}]\n'))
    assert rows["text"] == ["a", "b"]
    assert caplog.text.count("list.jsonl holds a JSON list") == 1
    caplog.clear()
    load_rows(write(tmp_path / "list.json", '[{"text": "a"}, {"text": "b"}]\n'))
    load_rows(write(tmp_path / "lines.jsonl", '{"text": "a"}\n'))
    assert "JSON list" not in caplog.text


def test_a_folder_names_the_file_and_line_at_fault(tmp_path):
    write(tmp_path / "a.jsonl", LINES)
    write(tmp_path / "b.jsonl", '{"text": "a", "n": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: not JSON"):
        load_rows(tmp_path)


def test_a_stream_names_the_line_at_fault_when_it_gets_there(tmp_path):
    rows = iter(load_rows(write(tmp_path / "bad.jsonl", '{"text": "a"}\n{"text" "b"}\n'), streaming=True))
    assert next(rows) == {"text": "a"}
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not JSON"):
        next(rows)


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    write(tmp_path / "train.jsonl", LINES)
    with pytest.raises(FileNotFoundError, match=r"trian\.jsonl'\. Did you mean 'train\.jsonl'\?"):
        load_rows(tmp_path / "trian.jsonl")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no files that can be read"):
        load_rows(tmp_path)


def test_a_whole_disk_is_no_dataset():
    with pytest.raises(ValueError, match="/ is the whole disk: name the folder of the rows"):
        load_rows("/")


def test_a_name_that_the_hub_does_not_have_is_named(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("lowtide.data.sources.load.load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"'user/data' is no file or folder here, and no dataset .*no route"):
        load_rows("user/data")


def test_a_hub_name_is_loaded_with_its_configuration_and_split(monkeypatch):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("lowtide.data.sources.load.load_dataset", load)
    assert len(load_rows("user/data", name="main", split="test")) == 2
    assert calls == [(("user/data", "main"), {"split": "test", "streaming": False})]


@pytest.mark.parametrize(
    ("rows", "problem"), [([], "the list of rows is empty"), ([{"a": 1}, 3], "row 1 .* is a int; every row must")]
)
def test_a_list_that_cannot_be_read_is_refused(rows, problem):
    with pytest.raises(ValueError, match=problem):
        load_rows(rows)


def test_a_configuration_of_a_file_is_warned_of_and_a_split_is_named(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    assert len(load_rows(path, name="english")) == 1
    assert "has no configuration 'english': the name has no effect" in caplog.text
    with pytest.raises(ValueError, match=r"rows.jsonl, split 'train\[:200%\]', can't be read"):
        load_rows(path, split="train[:200%]")


@pytest.mark.parametrize(("content", "said"), [(LINES.encode("utf-16"), "not UTF-8"), (bytes(range(256)), "not JSON")])
def test_what_is_no_text_is_said_once_and_by_us(tmp_path, caplog, content, said):
    file = write(tmp_path / "rows.jsonl", content)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: {said}"):
        load_rows(file)
    assert "Failed to load" not in caplog.text


@pytest.mark.parametrize("reader", READS_HERE)
def test_a_reader_does_not_read_whatever_lies_in_the_current_folder(reader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=f"'{reader}' is a reader of `datasets`, which would read whatever lies"):
        load_rows(reader)
    (tmp_path / reader).mkdir()
    (tmp_path / reader / "rows.jsonl").write_text('{"text": "a"}\n')
    check_place(reader)
