"""Columns and templates are looked at before the weights of a model that is given by name are read."""

import re
from pathlib import Path

import pytest
from datasets import Dataset

import lowtide
from lowtide.demo.model import save
from lowtide.engine.weights import loading

TEXT = [{"text": "one two"}] * 6
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 6
TALK = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 6


class Read(Exception):
    """The weights are about to be read."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("look")
    save(path, seed=0)
    return path


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    def refuse(*args, **kwargs):
        raise Read

    monkeypatch.setattr(loading, "load_complete", refuse)


def make(folder, tmp_path, kind, rows, *, evaluated=None, **options):
    config = getattr(lowtide, f"{kind}Config")(str(tmp_path / "out"), use_cpu=True, report_to="none", **options)
    eval_dataset = None if evaluated is None else Dataset.from_list(evaluated)
    trainer = getattr(lowtide, f"{kind}Trainer")
    rewarded = {"reward_funcs": [len]} if kind == "GRPO" else {}
    trainer(str(folder), **rewarded, args=config, train_dataset=Dataset.from_list(rows), eval_dataset=eval_dataset)


@pytest.mark.parametrize(
    ("kind", "rows", "says"),
    [
        ("SFT", [{"txt": "a"}], "the train dataset has the columns 'txt'"),
        ("DPO", TEXT, "pairs need 'chosen' and 'rejected'"),
        ("KTO", TEXT, "labelled completions need 'prompt'"),
        ("GRPO", TEXT, "has no column `prompt`"),
        ("SFT", [*TALK, {"messages": [{"role": "assistant", "content": "b"}]}][::-1], "row 0 (the first is 0): roles"),
    ],
)
def test_rows_that_cannot_be_read_are_told_before_weights_are(kind, rows, says, folder, tmp_path):
    with pytest.raises(ValueError, match=re.escape(says)):
        make(folder, tmp_path, kind, rows)


def test_empty_datasets_are_told_before_weights_are(folder, tmp_path):
    for rows, evaluated, name in (([], None, "train"), (TEXT, [], "eval")):
        with pytest.raises(ValueError, match=f"the {name} dataset has no rows"):
            make(folder, tmp_path, "SFT", rows, evaluated=evaluated)


def test_rows_to_evaluate_on_are_looked_at_too(folder, tmp_path):
    with pytest.raises(ValueError, match="the eval dataset has the columns 'txt'"):
        make(folder, tmp_path, "SFT", TEXT, evaluated=[{"txt": "a"}])


def test_a_template_that_fails_is_told_before_weights_are_read(folder, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ raise_exception('no such turn') }}")
    with pytest.raises(ValueError, match="no such turn"):
        make(folder, tmp_path, "SFT", TALK, chat_template_path=str(tmp_path / "own.jinja"))


@pytest.mark.parametrize(
    ("kind", "rows", "options"),
    [
        ("SFT", TEXT, {"packing": True, "max_length": 64}),
        ("SFT", TALK, {"shuffle_dataset": True}),
        ("SFT", [{"input_ids": [1, 2, 3]}] * 6, {}),
        ("Pretrain", TEXT, {}),
        ("DPO", PAIRS, {}),
        ("Reward", PAIRS, {}),
        ("KTO", [{"prompt": "a", "completion": "b", "label": index % 2 == 0} for index in range(6)], {}),
        ("KTO", PAIRS, {"max_length": 8}),
    ],
)
def test_rows_that_can_be_read_come_through_in_silence(kind, rows, options, folder, tmp_path, caplog):
    with pytest.raises(Read):
        make(folder, tmp_path, kind, rows, **options)
    assert not caplog.records


def test_a_subclass_that_prepares_rows_itself_sees_them_first(folder, tmp_path):
    class Own(lowtide.SFTTrainer):
        def prepare(self, dataset, name):
            raise AssertionError("weights come first")

    config = lowtide.SFTConfig(str(tmp_path / "out"), use_cpu=True, report_to="none")
    with pytest.raises(Read):
        Own(str(folder), args=config, train_dataset=Dataset.from_list([{"own": 1}]))


def test_columns_that_are_not_used_are_told_by_the_preparation_itself(folder, tmp_path, caplog, monkeypatch):
    with pytest.raises(Read):
        make(folder, tmp_path, "SFT", [{"text": "a", "unused_here": 1}] * 6)
    assert not caplog.records
    monkeypatch.undo()
    make(folder, tmp_path, "SFT", [{"text": "a", "unused_here": 1}] * 6)
    assert caplog.text.count("not used: 'unused_here'") == 1
