"""The last log of a run, its summary: what TRL's has of the steps that were not logged."""

from __future__ import annotations

import pytest
from datasets import Dataset
from peft import PromptEncoderConfig, TaskType

from lowtide import SFTConfig, SFTTrainer
from lowtide.demo.model import make_model, make_tokenizer
from tests.support.models.tiny_models import build, tokens

ROWS = [{"input_ids": [token % 12 + 1 for token in tokens(5 + number, number)]} for number in range(12)]
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}


def run(folder, model=None, **options):
    peft = {"peft_config": options.pop("peft_config")} if "peft_config" in options else {}
    args = SFTConfig(
        str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=1e-3,
        dataset_kwargs={"skip_prepare_dataset": True},
        **{"num_train_epochs": 1, **options},
    )
    tokenizer = make_tokenizer()
    made = SFTTrainer(
        make_model(tokenizer, 0) if model is None else model,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        **peft,
    )
    return made, made.train()


def test_a_mixture_of_experts_has_its_auxiliary_loss_and_accuracy(tmp_path):
    each, _ = run(tmp_path, build("qwen3_moe", **MIXTURE), logging_steps=1)
    seldom, _ = run(tmp_path, build("qwen3_moe", **MIXTURE))
    steps, last = each.state.log_history[:-1], seldom.state.log_history[-1]
    assert len(steps) == 3
    assert len(seldom.state.log_history) == 1
    seen = [0, *(step["num_tokens"] for step in steps)]
    tokens_of = [seen[n + 1] - seen[n] for n in range(3)]
    mean = sum(step["aux_loss"] * count for step, count in zip(steps, tokens_of, strict=True)) / sum(tokens_of)
    assert last["aux_loss"] == pytest.approx(mean, rel=1e-5)
    assert last["entropy"] > 0
    assert 0 <= last["mean_token_accuracy"] <= 1
    assert last["num_tokens"] == steps[-1]["num_tokens"] == sum(len(row["input_ids"]) for row in ROWS)


def test_what_is_logged_already_does_not_come_twice(tmp_path):
    made, returned = run(tmp_path, build("qwen3_moe", **MIXTURE), logging_steps=1)
    last = made.state.log_history[-1]
    assert not {"aux_loss", "entropy", "mean_token_accuracy", "num_tokens"} & last.keys()
    assert returned.metrics["train_loss"] == last["train_loss"]


def test_what_train_returns_is_as_it_was(tmp_path):
    _, returned = run(tmp_path)
    assert not {"entropy", "mean_token_accuracy", "num_tokens"} & returned.metrics.keys()


def test_a_prompt_that_is_tuned_has_an_accuracy(tmp_path):
    config = PromptEncoderConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    made, _ = run(tmp_path, peft_config=config)
    assert 0 <= made.state.log_history[-1]["mean_token_accuracy"] <= 1
