"""Environments that write their prompts themselves, so that there is no dataset."""

from __future__ import annotations

from typing import ClassVar

import pytest
from datasets import Dataset

import lowtide
from tests.rollout.chat_templates import HERMES_TEMPLATE
from tests.support.models.tiny_models import build
from tests.support.runs.online_runs import SETTINGS, online, prompts
from tests.support.texts.byte_tokenizer import byte_tokenizer


class Asks:
    """Asks the next question each time, and prefers long answers."""

    asked: ClassVar[list[str]] = []

    def reset(self, **row):
        self.question = f"What is {len(self.asked)} + 1?"
        self.asked.append(self.question)
        return self.question

    def look(self) -> str:
        """
        Looks around.
        """
        return "nothing"

    def get_reward(self):
        return float(len(self.question))


def made(folder, factory=Asks, **options):
    beside = {name: options.pop(name) for name in ("train_dataset", "eval_dataset", "reward_funcs") if name in options}
    tokenizer = byte_tokenizer(HERMES_TEMPLATE, eos="<|im_end|>")
    args = lowtide.GRPOConfig(output_dir=str(folder), **{**SETTINGS, "max_completion_length": 4, **options})
    model = build("llama", vocab_size=len(tokenizer))
    return lowtide.GRPOTrainer(model, args=args, processing_class=tokenizer, environment_factory=factory, **beside)


def test_a_run_without_a_dataset_is_as_long_as_max_steps_says(tmp_path):
    Asks.asked.clear()
    trainer = made(tmp_path, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(Asks.asked) == 2 * 8  # one for each completion of each step
    assert trainer.state.log_history[0]["reward"] == pytest.approx(sum(map(len, Asks.asked[:8])) / 8)


def test_what_says_how_long_it_is_or_what_is_asked_is_needed(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is required, since max_steps is not set"):
        made(tmp_path, max_steps=-1)
    with pytest.raises(ValueError, match="`train_dataset` is required, since environment_factory has several"):
        made(tmp_path, {"asks": Asks})


class Quiet:
    def reset(self, **row): ...

    def listen(self) -> str:
        """
        Listens.
        """
        return "nothing"


def test_rows_that_choose_among_environments_need_no_prompts(tmp_path, caplog):
    Asks.asked.clear()
    rows = Dataset.from_dict({"environment": ["asks", "quiet"] * 2})
    factory = {"asks": Asks, "quiet": Quiet}
    args = {"reward_funcs": [lambda completions, **_: [0.5] * len(completions)], "reward_weights": [2.0]}
    trainer = made(tmp_path, factory, train_dataset=rows, eval_dataset={"some": rows}, max_steps=1, **args)
    trainer.train()
    assert Asks.asked
    assert trainer.reward_func_names[1:] == ["Asks"]
    assert trainer.reward_weights.tolist() == [2.0, 1.0]
    assert "has no column `prompt`: what the environment's reset returns is the whole prompt" in caplog.text


def test_prompts_are_prepared_without_a_process_beside_this_one(tmp_path):
    args = {"dataset_num_proc": 0, "eval_strategy": "steps", "arguments": {"eval_dataset": prompts(4)}}
    made = online(tmp_path, **args)
    assert list(made.train_dataset) == list(online(tmp_path).train_dataset)
    assert len(made.eval_dataset) == 4
