"""`memory_budget`: what a trainer chooses when it is made, and what it leaves alone."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from accelerate.state import PartialState
from datasets import Dataset
from transformers import TrainingArguments

import lowtide
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.planner.process import process_bytes

CHECKPOINTED = {
    "gradient_checkpointing": True,
    "checkpointing_policy": "full",
    "checkpointing_every": 1,
    "activation_offloading": False,
}
"""With all of them set there is little to choose, and to trace."""
ROWS = Dataset.from_list([{"text": "17 + 5 = 22 " * count} for count in (4, 8, 16, 30)] * 4)


def config(folder, **options) -> lowtide.SFTConfig:
    always = {"output_dir": str(folder), "use_cpu": True, "max_steps": 1, "report_to": "none", "disable_tqdm": True}
    return lowtide.SFTConfig(**{**always, "save_strategy": "no", **options})


def trainer(args: lowtide.SFTConfig) -> lowtide.SFTTrainer:
    tokenizer = make_tokenizer()
    return lowtide.SFTTrainer(make_model(tokenizer, seed=0), args, train_dataset=ROWS, processing_class=tokenizer)


@pytest.mark.slow
def test_a_roomy_budget_buys_time(tmp_path):
    made = trainer(config(tmp_path, memory_budget="64GiB"))
    assert made.planned.settings == {"gradient_checkpointing": False}
    assert made.args.gradient_checkpointing is False
    lines = dict(made.callback_handler.callbacks[-1].lines())
    assert "gradient_checkpointing=False; predicted peak" in lines["memory budget"]
    assert made.predicted_bytes == made.planned.peak_bytes > process_bytes()
    assert made.train().global_step == 1


@pytest.mark.slow
def test_what_was_set_by_hand_stays(tmp_path):
    made = trainer(config(tmp_path, memory_budget="auto", tokens_per_microbatch=256, **CHECKPOINTED))
    assert made.planned.settings == {}
    assert (made.args.gradient_checkpointing, made.args.tokens_per_microbatch) == (True, 256)


def test_what_was_changed_after_construction_stays(tmp_path):
    args = config(tmp_path, memory_budget="64GiB")
    args.learning_rate = 0.5
    assert trainer(args).args.learning_rate == 0.5


def test_a_budget_below_the_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the budget of 10 B is below the weights, which take .* Ways out: "):
        trainer(config(tmp_path, memory_budget="10B"))


@pytest.mark.slow
def test_a_budget_below_the_process_says_what_is_most_and_one_below_the_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"budget of 97.7 KiB is below the weights.* --lossy "):
        trainer(config(tmp_path, memory_budget="100KB"))
    with pytest.warns(UserWarning, match=r"nothing fits .* smallest peak .* The run goes on with"):
        made = trainer(config(tmp_path, memory_budget=str(process_bytes()), **CHECKPOINTED))
    assert made.planned.text.startswith("nothing fits by the estimate")
    assert made.planned.peak_bytes > process_bytes()


@pytest.mark.slow
def test_what_is_doubtful_is_said_once(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="lowtide"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        args = config(tmp_path, memory_budget="64GiB", **CHECKPOINTED)
        made = lowtide.SFTTrainer(
            make_model(make_tokenizer(), seed=0),
            args,
            train_dataset=Dataset.from_list([{"prompt": "1 + 1 =", "completion": text} for text in ("", " 2")]),
            processing_class=make_tokenizer(),
        )
    assert made.planned.text
    said = Counter(record.getMessage() for record in caplog.records) + Counter(str(each.message) for each in warned)
    about_rows = [message for message in said if "completion" in message and "is empty" in message]
    assert len(about_rows) == 1
    assert {message: count for message, count in said.items() if count > 1} == {}


def test_a_budget_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no amount of memory"):
        trainer(config(tmp_path, memory_budget="plenty"))


def test_a_config_knows_what_it_was_given():
    args = lowtide.SFTConfig("run", gradient_checkpointing=True, use_cpu=True)
    expected = {"output_dir": "run", "gradient_checkpointing": True, "use_cpu": True}
    assert args.requested == copy.copy(args).requested == pickle.loads(pickle.dumps(args)).requested == expected


def test_where_a_parser_gave_everything_what_differs_was_given():
    plain = TrainingArguments(output_dir="run", use_cpu=True, learning_rate=1e-3)
    every = {each.name: getattr(plain, each.name) for each in dataclasses.fields(TrainingArguments) if each.init}
    given = lowtide.SFTConfig(**every).requested
    assert given["learning_rate"] == 1e-3
    assert "weight_decay" not in given


def test_a_plan_leaves_the_state_of_accelerate_alone(tmp_path):
    args = config(tmp_path, memory_budget="64GiB", **CHECKPOINTED)
    assert args.device.type == "cpu"
    before = dict(PartialState._shared_state)
    made = trainer(args)
    assert made.accelerator.state.device == args.device
    assert before.items() <= PartialState._shared_state.items()


@pytest.mark.slow
def test_where_no_whole_row_fits_it_is_trained_in_pieces(tmp_path):
    script, tokens = Path(__file__).with_name("pieces_child.py"), 2048
    done = subprocess.run(
        [sys.executable, script, tmp_path, str(tokens)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["settings"]["tokens_per_microbatch"] < tokens
    assert set(found["cut"]) == {tokens}
    assert found["peak"] == pytest.approx(found["predicted"], rel=0.06)
    assert found["peak"] < found["whole"]


def test_what_evaluates_in_its_own_way_keeps_rows_whole(tmp_path, monkeypatch):
    class Asked(Exception):
        pass

    def planned(*_, whole_rows: bool, **__) -> None:
        raise Asked(whole_rows)

    class Own(lowtide.SFTTrainer):
        def prediction_step(self, *args, **kwargs):
            return super().prediction_step(*args, **kwargs)

    monkeypatch.setattr("lowtide.trainers.method.fit_budget", planned)
    for kind, whole in ((lowtide.SFTTrainer, False), (Own, True)):
        args = config(tmp_path, memory_budget="1GiB")
        with pytest.raises(Asked, match=str(whole)):
            kind("no-model", args, train_dataset=ROWS, processing_class=make_tokenizer())
