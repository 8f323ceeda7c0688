"""What is mistyped is told before torch is imported: names, values, files, devices."""

import json
import os
import subprocess
import sys

import pytest

from lowtide.cli.training import option_table, train
from lowtide.data.sources.places import check_place
from lowtide.engine.weights.places import check_model_place

RUNS = {
    "option": ("sft --modl m", "there is no option --modl; did you mean '--model'?"),
    "of another method": ("sft --beta 1", "there is no option --beta: it is of dpo, kto"),
    "of older versions": ("sft --warmup_ratio 1", "an option of older versions: use `warmup_steps`"),
    "value": ("dpo --model m --dataset rows.jsonl --learning_rate fast", "--learning_rate='fast' must be a number"),
    "range": ("dpo --model m --dataset rows.jsonl --beta=-1", "--beta=-1 must be at least 0"),
    "choice": ("sft --model m --dataset rows.jsonl --optim adamv", "optim='adamv' is not one of"),
    "key of a run file": ("sft --config run.yaml", "run.yaml, line 2: there is no option 'datasett'; did you mean"),
    "run file": ("sft --config rum.yaml", "--config: there is no file 'rum.yaml'"),
    "rows": (
        "sft --model m --dataset rosw.jsonl",
        "there is no file or folder 'rosw.jsonl'. Did you mean 'rows.jsonl'",
    ),
    "rows of several": ("sft --model m --datasets rows.jsonl rosw.jsonl", "there is no file or folder 'rosw.jsonl'"),
    "rows to evaluate on": ("sft --model m --dataset rows.jsonl --eval_dataset ./no", "no file or folder 'no'"),
    "spreadsheet": ("sft --model m --dataset rows.xlsx", "pandas.read_excel('rows.xlsx').to_csv('rows.csv'"),
    "empty rows": ("sft --model m --dataset empty.jsonl", "empty.jsonl is empty"),
    "model": ("sft --model ./no --dataset rows.jsonl", "model './no' cannot be loaded: there is no such folder"),
    "checkpoint": ("sft --model m --dataset rows.jsonl --resume_from_checkpoint no", "'no' is no checkpoint folder"),
    "device": (
        "estimate sft --model m --lengths 8x8 --device H1000",
        "unknown device 'H1000'; did you mean 'H100-80GB'",
    ),
    "device of gpus": ("gpus sft --model m --device H1000", "unknown device 'H1000'; did you mean 'H100-80GB'"),
    "devices": ("plan sft --model m --lengths 8x8 --devices H100", "devices 'H100' are no number of GPUs"),
    "rows to show": ("show rosw.jsonl --model m", "there is no file or folder 'rosw.jsonl'"),
    "option of show": (
        "show rows.jsonl --model m --max_lenght 3",
        "no option --max_lenght; did you mean",
    ),
    "rows to measure": ("lengths rosw.jsonl --tokenizer m", "there is no file or folder 'rosw.jsonl'"),
    "a file of rewards": (
        "grpo --model m --dataset rows.jsonl --reward_funcs length ./rewards.py",
        "reward_funcs './rewards.py' is a file: name the function in it by its path, as rewards.NAME",
    ),
    "a function of a file": (
        "grpo --model m --dataset rows.jsonl --tools own/tools.py:look",
        "tools 'own/tools.py:look' is a file: name the function in it by its path, as own.tools.look",
    ),
    "budget": ("plan sft --model m --lengths 8x8 --budget 24XB", "memory budget '24XB' is no amount of memory"),
}
COLUMNS = {
    "columns": ("sft --model m --dataset odd.csv", '--columns \'{"prompt": "User Question", "completion": "Bot'),
    "columns of pairs": ("dpo --model m --dataset odd.csv", "pairs need 'chosen' and 'rejected'"),
    "prompts": ("grpo --model m --dataset odd.csv --reward_funcs format", 'columns: {prompt: "User Question"}'),
    "a name of columns": ("sft --model m --dataset odd.csv --columns prompt=Usr", "has no column 'Usr'"),
    "columns of a folder": ("kto --model m --dataset folder", "labelled completions need 'prompt', 'completion' and"),
    "no rows to evaluate on": ("sft --model m --dataset rows.jsonl --eval_strategy epoch", "split 'test'"),
}
"""What is told of files' columns, for which `datasets` is imported."""
ALL = """
import contextlib, io, json, sys, time
from lowtide.cli.main import main
found = {}
for name, words in json.loads(sys.argv[1]).items():
    before = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(words.split())
    found[name] = (status, said.getvalue(), time.process_time() - before)
print(json.dumps({"runs": found, "imported": [each for each in ("torch", "transformers") if each in sys.modules]}))
"""


@pytest.mark.parametrize(("runs", "most"), [(RUNS, 1), (COLUMNS, 4)], ids=["names", "columns"])
def test_a_mistyped_name_is_told_before_torch_is_imported_and_within_seconds(tmp_path, runs, most):
    (tmp_path / "odd.csv").write_text("User Question,Bot Answer\na,b\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/odd.jsonl").write_text('{"User Question": "a"}\n')
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rows.xlsx").write_text("PK")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "run.yaml").write_text("model: m\ndatasett: rows.jsonl\n")
    words = json.dumps({name: words for name, (words, _) in runs.items()})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", ALL, words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["imported"] == []
    for name, (status, said, seconds) in found["runs"].items():
        assert (status, runs[name][1] in said) == (2, True), (name, said)
        assert seconds < most, (name, seconds)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_with_another_version_of_transformers_the_classes_are_asked(method, monkeypatch):
    declared = train.declared_options(method)
    assert train.options_of_command(method) == declared
    monkeypatch.setattr(option_table.metadata, "version", lambda name: "9.1.0")
    option_table._written.cache_clear()
    try:
        assert option_table.written_options(method) is None
        assert train.options_of_command(method) == declared
        assert option_table.whose("beta").startswith(": it is of dpo")
    finally:
        option_table._written.cache_clear()


def test_a_name_of_the_hub_is_left_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_place("owner/rows")
    check_model_place("owner/model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file.bin", "it is a file, and a model is a folder"),
        ("above", "the folder has no config.json: did you mean above/model"),
        ("./abvoe", "there is no such folder; did you mean 'above'"),
    ],
)
def test_a_path_where_no_model_is_names_the_nearest(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "above/model").mkdir(parents=True)
    (tmp_path / "above/model/config.json").write_text("{}")
    (tmp_path / "file.bin").touch()
    with pytest.raises(ValueError, match=message):
        check_model_place(name)
    check_model_place("above/model")
