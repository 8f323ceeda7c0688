"""`lowtide lengths` from files to its table, its picture and its page."""

import argparse
import json
import os
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowtide.cli import lengths
from lowtide.data.report.lengths import LengthReport, share

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A folder with a tokenizer for which each word is one token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    built.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the subcommand, and gives what it printed as one line of single-spaced words."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments) -> str:
        parser = argparse.ArgumentParser()
        lengths.add_parser(parser.add_subparsers())
        args = parser.parse_args(["lengths", *map(str, arguments)])
        assert args.run(args) == 0
        return " ".join(capsys.readouterr().out.split())

    return run


def write_rows(path, counts) -> str:
    """Rows of so many words; the end token adds one token to each."""
    path.write_text("".join(json.dumps({"text": " ".join(["word"] * count)}) + "\n" for count in counts))
    return str(path)


def test_the_table_the_picture_and_the_page(run, tokenizer, tmp_path):
    data = write_rows(tmp_path / "rows & more.jsonl", [9] * 989 + [19] * 11)  # 10 tokens and 20 tokens
    out = tmp_path / "deep" / "report"
    printed = run(data, "--tokenizer", tokenizer, "--max_length", 10, 16, 20, "--batch_size", 10, "--output_dir", out)
    assert "1,000 10,110 10 10 10 10 20 20" in printed  # rows, tokens, mean, median, 90%, 95%, 99%, longest
    assert "Recommended: max_length=20" in printed
    padding = 1 - 10110 / (98 * 100 + 2 * 200)  # the long rows are the last 11: they reach into two batches of ten
    assert f"batches of 10 would be {share(padding)} padding" in printed
    assert sorted(os.listdir(out)) == ["lengths.html", "lengths.png"]
    page = (out / "lengths.html").read_text(encoding="utf-8")
    assert "rows &amp; more.jsonl" in page
    assert "20 is the smallest candidate" in page


def test_lengths_are_in_dataset_order_whole_and_without_limit(run, tokenizer, tmp_path, monkeypatch):
    counts = np.random.default_rng(0).integers(1, 3000, 50).tolist()
    data = write_rows(tmp_path / "rows.jsonl", counts)
    seen, report = [], LengthReport.from_lengths
    monkeypatch.setattr(LengthReport, "from_lengths", lambda found, *rest: seen.append(found) or report(found, *rest))
    printed = run(data, "--tokenizer", tokenizer, "--max_length", 100, "--output_dir", tmp_path / "out")
    [found] = seen
    assert found.tolist() == [count + 1 for count in counts]
    assert "left out" not in printed


def test_several_datasets_are_one(run, tokenizer, tmp_path):
    first, second = write_rows(tmp_path / "a.jsonl", [9] * 30), write_rows(tmp_path / "b.jsonl", [19] * 30)
    entry = json.dumps({"path": second, "columns": ["text"], "split": "train[:10]"})
    printed = run(first, entry, "--tokenizer", tokenizer, "--output_dir", tmp_path / "report")
    assert "40 500 12 10 20 20 20 20" in printed  # rows, tokens, mean, median, 90%, 95%, 99%, longest


def test_rows_with_nothing_to_train_on_are_named(run, tokenizer, tmp_path):
    data = tmp_path / "tokens.jsonl"
    rows = [{"input_ids": [1, 1, 1], "labels": [-100, -100, last]} for last in (1, -100, 1)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = run(data, "--tokenizer", tokenizer, "--output_dir", tmp_path / "out")
    assert "1 rows have no token to train on" in printed


def test_conversations_with_a_template_from_a_file(run, tokenizer, tmp_path):
    data, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    messages = [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d"}]
    data.write_text(json.dumps({"messages": messages}) + "\n")
    template.write_text(TEMPLATE)
    out = tmp_path / "out"
    printed = run(data, "--tokenizer", tokenizer, "--chat_template_path", template, "--output_dir", out)
    assert "1 8 8" in printed  # one row of 8 tokens: two roles, four words, two ends


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "none.jsonl"}, "none.jsonl"),
        ({"--tokenizer": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"--dataset_split": "validation"}, "validation"),
    ],
)
def test_what_cannot_work_is_said(run, tokenizer, tmp_path, arguments, message):
    data = write_rows(tmp_path / "rows.jsonl", [3])
    options = {"--tokenizer": tokenizer, "--output_dir": tmp_path / "out", **arguments}
    data = options.pop("data", data)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(data, *(part for option in options.items() for part in option))


@pytest.mark.parametrize("option", ["--max_length", "--batch_size", "--dataset_num_proc"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many"])
def test_numbers_are_checked_while_parsing(run, capsys, option, value):
    with pytest.raises(SystemExit, match="2"):
        run("rows.jsonl", "--tokenizer", "t", f"{option}={value}")
    assert f"argument {option}: must be a whole number from 1 on, not '{value}'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_read(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output_dir .*file/out can't be made: .*name another folder"):
        run("absent.jsonl", "--tokenizer", "absent", "--output_dir", tmp_path / "file" / "out")


def test_the_parser_is_light():
    """`lowtide --help` builds it; nothing heavy may come with it."""
    code = (
        "import sys, argparse; from lowtide.cli import lengths; "
        "lengths.add_parser(argparse.ArgumentParser().add_subparsers()); "
        "sys.exit(bool({'torch', 'numpy', 'datasets', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
