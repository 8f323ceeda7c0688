"""What is traced in a process of its own: the same numbers, and nothing of it here."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import LlamaConfig

import lowtide
from lowtide.planner.plan import PlanError
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.planner.tracing_process import in_tracing_process, tracing_here
from lowtide.planning import estimate, plan
from tests.support.tracing import answer, die, report, warn_and_log

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
DESCRIBED = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2)
ROWS = Dataset.from_list([{"prompt": "1 + 2 = ", "completion": "3"}] * 8)

pytestmark = pytest.mark.traced_apart


def config(folder: Path, **options) -> lowtide.SFTConfig:
    return lowtide.SFTConfig(output_dir=str(folder), use_cpu=True, report_to="none", **options)


@pytest.mark.slow
def test_an_estimate_is_the_one_that_is_made_here_and_nothing_of_it_is(tmp_path, monkeypatch):
    class Own(lowtide.SFTConfig):
        """Of this test alone: another process does not know it."""

    args = Own(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with tracing_here():
        here = estimate(args, DESCRIBED, lengths=[20, 30])
    monkeypatch.setattr(FakeRun, "__init__", lambda *_: pytest.fail("traced in this process"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    apart = estimate(args, DESCRIBED, lengths=[20, 30])
    assert (apart.phases, apart.phase) == (here.phases, here.phase)


@pytest.mark.slow
def test_a_budget_below_everything_is_an_error_with_its_numbers():
    with pytest.raises(PlanError, match="the budget of 10 B is below the weights") as caught:
        plan("sft", DESCRIBED, ROWS, 10, processing_class=lowtide_tokenizer(), explain=False)
    assert caught.value.peak_bytes > 1000


def lowtide_tokenizer():
    from lowtide.demo.model import make_tokenizer

    return make_tokenizer()


@pytest.mark.slow
def test_what_is_said_there_is_said_here(caplog):
    with caplog.at_level(logging.WARNING, logger="lowtide"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert in_tracing_process(warn_and_log, 3) == 9
    assert [str(each.message) for each in warned] == ["3 is odd"]
    assert ("lowtide.test", logging.WARNING, "3 squared") in caplog.record_tuples


@pytest.mark.slow
def test_a_process_that_ends_says_how_and_what_it_printed():
    with pytest.raises(RuntimeError, match=r"ended by SIGKILL, as a system does that runs out.*printed last: before"):
        in_tracing_process(die, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with status 3"):
        in_tracing_process(os._exit, 3)


@pytest.mark.slow
def test_errors_come_as_they_were_raised():
    with pytest.raises(FileNotFoundError, match="no-such"):
        in_tracing_process(os.stat, "no-such")
    with pytest.raises(RuntimeError, match="Peculiar: 1 and 2"):
        in_tracing_process(report, "peculiar")


@pytest.mark.slow
def test_what_is_printed_there_is_no_answer():
    assert in_tracing_process(answer, "printed") == "answered"


def test_what_cannot_be_sent_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be sent there: .*lambda"):
        estimate(config(tmp_path), DESCRIBED, lengths=[3], processing_class=lambda: None)


@pytest.mark.slow
def test_what_the_script_defines_is_not_known_there(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from peft import LoraConfig
            from transformers import LlamaConfig
            import lowtide

            class Own(LoraConfig):
                pass

            try:
                config = lowtide.SFTConfig(output_dir="x", use_cpu=True)
                lowtide.estimate(config, LlamaConfig(), lengths=[3], peft_config=Own())
            except ValueError as error:
                print(error)
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "'Own'" in done.stdout, done.stderr
    assert "put it into a module that is imported" in done.stdout


@pytest.mark.slow
def test_a_budget_of_a_trainer_is_planned_there(tmp_path, monkeypatch):
    from lowtide.demo.model import make_model

    monkeypatch.setattr(FakeRun, "traced", lambda *_, **__: pytest.fail("traced in this process"))
    tokenizer = lowtide_tokenizer()
    args = config(tmp_path, memory_budget="64GiB", max_steps=1, save_strategy="no", disable_tqdm=True)
    trainer = lowtide.SFTTrainer(make_model(tokenizer, seed=0), args, train_dataset=ROWS, processing_class=tokenizer)
    assert trainer.planned.settings == {"gradient_checkpointing": False}
