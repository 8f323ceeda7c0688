"""lowtide's Online DPO against TRL 1.16's: steps from the same weights, on the same completions.

TRL has no `rollout_func` here, and its generation is replaced. It has no judges any more either: a judge is compared
with a reward function that says the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tests.support.references.parity_world import (
    COMMON,
    assert_metrics_agree,
    build_model,
    lora,
    runs_of,
    sums,
    tokenizer,
    trained_alike,
    user,
    without_ties,
)

pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")
theirs = pytest.importorskip("trl.experimental.online_dpo")

MOST = 24
"""Tokens of a completion."""
SETTINGS = {
    **{name: value for name, value in COMMON.items() if name != "train_sampling_strategy"},
    **{"learning_rate": 1e-3, "max_new_tokens": MOST, "max_length": 256, "beta": 0.1},
}


@dataclass(frozen=True)
class Case:
    """One way to train; `flags` go to both libraries, `ours` to lowtide alone."""

    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    chat: bool = False
    two: bool = False
    """Two reward functions."""
    judge: bool = False
    as_long: bool = False
    """All completions have as many tokens: TRL counts padding into its metrics."""


CASES = {
    "sigmoid": Case(as_long=True),
    "sigmoid, completions of unequal length": Case(),
    "ipo": Case({"loss_type": "ipo"}),
    "missing end": Case({"missing_eos_penalty": 0.7}),
    "judge": Case(judge=True),
    "judge, ipo": Case({"loss_type": "ipo"}, judge=True),
    "lora": Case({"learning_rate": 5e-3}, lora=True),
    "lora, ipo": Case({"learning_rate": 5e-3, "loss_type": "ipo"}, lora=True),
    "two rewards": Case({"reward_weights": [1.0, 0.3]}, two=True),
    "conversations": Case(chat=True),
    "within a token budget": Case({}, {"tokens_per_microbatch": 130}),
    "prompts repeated": Case({}, {"prefix_sharing": False}),
    "padded by us": Case({}, {"padding_free": False}),
    "another beta": Case({"beta": 0.5}),
}
QUICK = ("sigmoid",)
LONG = ("sigmoid", "ipo", "lora")


class Writer:
    """Completions of random tokens, some of which end; the same again from a new writer."""

    def __init__(self, as_long: bool) -> None:
        self.asked: dict[str, int] = {}
        self.as_long = as_long

    def __call__(self, prompts: list[Any], trainer: Any = None) -> dict[str, Any]:
        made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            times = self.asked[text] = self.asked.get(text, 0) + 1
            rng = random.Random(f"{text} {times}")
            ids = [rng.randrange(3, 300) for _ in range(MOST - 1 if self.as_long else rng.randint(2, MOST - 1))]
            ids.append(tokenizer().eos_token_id if rng.random() < 0.6 else 5)
            encoded: Any = (
                tokenizer()(prompt)["input_ids"]
                if isinstance(prompt, str)
                else tokenizer().apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            )
            made["prompt_ids"].append(encoded)
            made["completion_ids"].append(ids)
        return made


def brief(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs between two completions."""
    return [-len(str(each)) / 20 for each in completions]


def odd(completion_ids: list[list[int]], number: list[int], **kwargs: Any) -> list[float]:
    """A reward that reads a column, and no padding."""
    return [(ids[0] + n) % 7 / 7 for ids, n in zip(completion_ids, number, strict=True)]


class Shorter:
    """A judge that prefers the shorter text, and of two that are as long the first."""

    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        return [int(len(second) < len(first)) for first, second in completions]


def build_trainer(library: Any, case: Case, folder: Any, steps: int) -> Any:
    ours = library is lowtide
    config = library.OnlineDPOConfig(
        output_dir=str(folder),
        **SETTINGS | {"max_steps": steps} | case.flags | (case.ours | {"shuffle_dataset": False} if ours else {}),
    )
    rows = [{"prompt": [user(q)] if case.chat else q, "number": n} for n, (q, _) in enumerate(sums(40))]
    arguments: dict[str, Any] = {"reward_funcs": [brief, odd] if case.two else [brief]}
    if case.judge and ours:
        arguments = {"judge": Shorter()}
    elif case.judge:
        arguments = {"reward_funcs": [lambda completions, **kwargs: [-len(each) for each in completions]]}
    if case.lora:
        torch.manual_seed(1)
        arguments["peft_config"] = lora()
    writer = Writer(case.as_long)
    trainer = library.OnlineDPOTrainer(
        model=saved(folder),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        **arguments | ({"rollout_func": writer} if ours else {}),
    )
    if not ours:
        trainer._generate = lambda model, prompts, images: padded(writer([*prompts, *prompts]))
        trainer._get_train_sampler = lambda dataset=None: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return trainer


def saved(folder: Any) -> Any:
    build_model("llama").save_pretrained(str(folder / "model"))
    return AutoModelForCausalLM.from_pretrained(str(folder / "model"))


def padded(made: dict[str, Any]) -> tuple[Any, ...]:
    """What TRL's generation returns: prompts padded on the left, completions on the right, each with its mask."""
    pad = tokenizer().pad_token_id
    prompts = [torch.tensor(ids) for ids in made["prompt_ids"]]
    completions = [torch.tensor(ids) for ids in made["completion_ids"]]
    left, left_mask = (
        pad_sequence(each, batch_first=True, padding_value=value, padding_side="left")
        for each, value in ((prompts, pad), ([torch.ones_like(p) for p in prompts], 0))
    )
    right, right_mask = (
        pad_sequence(each, batch_first=True, padding_value=value)
        for each, value in ((completions, pad), ([torch.ones_like(c) for c in completions], 0))
    )
    return left, left_mask, right, right_mask, None


OF_REWARDS = ("objective/scores", "objective/scores_margin")
OF_PADDING = ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward")


@runs_of(CASES, QUICK, LONG)
def test_steps_agree_with_trl(name, steps, tmp_path):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    trls = build_trainer(theirs, case, tmp_path / "theirs", steps)
    ours = build_trainer(lowtide, case, tmp_path / "ours", steps)
    expected, actual = trained_alike(trls, ours, steps)
    scale = max(expected["loss"].abs().max().item(), 0.1)
    torch.testing.assert_close(actual["grad_norm"], expected["grad_norm"], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-4, atol=1e-4 * scale)
    margins = expected["rewards/margins"]
    unlike = (*(OF_REWARDS if case.judge else ()), *(() if case.as_long else OF_PADDING))
    assert_metrics_agree(without_ties(actual, margins), without_ties(expected, margins), unlike=unlike)
