"""Steps, evaluations and processes that an option asks for and that there are not."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from transformers import EarlyStoppingCallback

from lowtide import SFTConfig
from lowtide.run.options.schedule import unevaluated
from tests.support.matrix.matrix import make

BASE: dict[str, Any] = {"use_cpu": True, "report_to": "none"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logging_steps": 0}, "logging_steps=0 must be above 0 with logging_strategy='steps'"),
        ({"save_steps": 0, "save_strategy": "steps"}, "save_steps=0 must be above 0 with save_strategy='steps'"),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, "load_best_model_at_end=True compares evaluations"),
        ({"load_best_model_at_end": True, "save_strategy": "best"}, "load_best_model_at_end=True compares"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best' compares evaluations"),
        ({"dataset_num_proc": -1}, "dataset_num_proc=-1 must be at least 0"),
    ],
)
def test_what_there_is_none_of_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        SFTConfig(str(tmp_path), **BASE, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"logging_steps": 0, "logging_strategy": "no"},
        {"save_steps": 0, "save_strategy": "epoch"},
        {"eval_steps": 0},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "loss"},
    ],
)
def test_what_is_not_used_is_taken(options, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        made = SFTConfig(str(tmp_path), **BASE, **options)
    assert all(getattr(made, name) == value for name, value in options.items())
    assert not [each for each in caplog.records if each.name.startswith("lowtide")]


def test_evaluating_every_0_steps_is_said(tmp_path, caplog):
    made = SFTConfig(str(tmp_path), **BASE, eval_strategy="steps", eval_steps=0, logging_steps=7)
    assert made.eval_steps == 7
    assert "eval_steps=0 is taken for None: every logging_steps=7 steps" in caplog.text


def test_no_process_is_this_one_and_that_is_said(tmp_path, caplog):
    SFTConfig(str(tmp_path), **BASE, dataset_num_proc=0)
    assert "dataset_num_proc=0 is taken for None: the dataset is prepared in this process" in caplog.text


def test_more_processes_than_cores_are_capped_aloud(tmp_path, caplog):
    made = SFTConfig(str(tmp_path), **BASE, dataset_num_proc=1000)
    assert made.dataset_num_proc == len(os.sched_getaffinity(0))
    assert f"dataset_num_proc=1000 is set to {made.dataset_num_proc}, the cores" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set eval_strategy='steps' or 'epoch'"),
        ({"eval_strategy": "epoch"}, "set metric_for_best_model"),
        ({"eval_strategy": "epoch", "metric_for_best_model": "loss"}, None),
    ],
)
def test_early_stopping_without_evaluations_is_refused(options, message):
    def trainer() -> Any:
        return make("SFT", arguments={"callbacks": [EarlyStoppingCallback()]}, **options)

    if message is None:
        trainer()
        return
    with pytest.raises(ValueError, match=message):
        trainer()


@pytest.mark.parametrize(("options", "said"), [({"warmup_steps": 2}, 1), ({"warmup_steps": 1}, 0)])
def test_a_warmup_that_does_not_end_is_said_once(options, said, caplog):
    made = make("SFT", max_steps=2, lr_scheduler_type="linear", **options)
    made.train()
    assert caplog.text.count(f"learning_rate={made.args.learning_rate:g} is never reached. Lower warmup_steps") == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eval_steps": 1}, ""),
        ({"eval_steps": 0.5}, ""),
        ({"eval_steps": 3}, "eval_steps=3 is beyond the run's 2 steps"),
        ({"eval_steps": 1, "eval_delay": 3}, "eval_delay=3 is beyond the run's 2 steps"),
        ({"eval_strategy": "no", "eval_steps": 3}, ""),
    ],
)
def test_evaluations_beyond_the_run_are_said(options, said, tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **{"eval_strategy": "steps", **options})
    assert unevaluated(args, 2).startswith(said)
    assert bool(unevaluated(args, 2)) == bool(said)


@pytest.mark.parametrize(("every", "said"), [(2, 0), (1000, 1)])
def test_checkpointing_beyond_the_layers_is_said(every, said, caplog):
    made = make("SFT", max_steps=2, gradient_checkpointing=True, checkpointing_every=every)
    layers = made.model.config.num_hidden_layers
    assert caplog.text.count(f"checkpointing_every={every} is beyond the model's {layers} layers") == said
