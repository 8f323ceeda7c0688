"""RLOO beside its textbook computation in float64: one dense forward a completion, a plain AdamW, rewards as they are.

Among the rewards are groups of which all are equal, as rounding leaves them. Their advantages are exactly 0, and so
are the gradients of tokens that only they contain. AdamW divides a gradient by its own size: were these 1e-8 instead,
as in float32, such a token would be moved as far as all others."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.marks import slow_but
from tests.support.references.parity_world import build_model, tokenizer
from tests.support.runs.online_runs import online

LEARNING_RATE, ROUNDS, ITERATIONS = 2e-4, 2, 2
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "without a reference": {"beta": 0.0},
    "a strong reference": {"beta": 0.5},
    "normalized": {"normalize_advantages": True},
    "clipped": {"reward_clip_range": (0.2, 0.4), "beta": 0.0, "normalize_advantages": True},
    "two completions": {"num_generations": 2},
    "eight completions": {"num_generations": 8},
    "temperature": {"temperature": 0.7},
    "large rewards": {"scale": 300.0, "beta": 0.0},
    "narrow clipping": {"epsilon": 0.01, "epsilon_high": 0.02},
    "truncated ones left out": {"mask_truncated_completions": True},
    "micro-batches": {"tokens_per_microbatch": 40},
}
LONGEST = 16


class Writer:
    """A `rollout_func` of random completions, which keeps what it wrote."""

    def __init__(self) -> None:
        self.rng, self.rounds = random.Random(1), []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        written = {"prompt_ids": [tokenizer()(prompt)["input_ids"] for prompt in prompts], "completion_ids": []}
        for number in range(len(prompts)):
            ids = [self.rng.randrange(3, 300) for _ in range(self.rng.randint(2, LONGEST - 2))]
            ended = [*ids, tokenizer().eos_token_id]
            written["completion_ids"].append(ids * LONGEST if number % 3 == 1 else ended)
        written["completion_ids"] = [ids[:LONGEST] for ids in written["completion_ids"]]
        self.rounds.append((written["prompt_ids"], written["completion_ids"]))
        return written | {"logprobs": [[0.0] * len(ids) for ids in written["completion_ids"]]}


def equal_in_every_second_group(completion_ids: list[list[int]], size: int) -> list[float]:
    return [0.1 + 0.2 if number // size % 2 else sum(ids) % 11 / 11 for number, ids in enumerate(completion_ids)]


def textbook_advantages(rewards: list[float], nats: list[Fraction], size: int, options: dict[str, Any]) -> list[float]:
    """Equation 8 of arXiv 2402.14740, in exact fractions."""
    low, high = options.get("reward_clip_range", (-math.inf, math.inf))
    beta = Fraction(options.get("beta", 0.05))
    whole = [Fraction(min(max(each, low), high)) - beta * nat for each, nat in zip(rewards, nats, strict=True)]
    found = []
    for number, own in enumerate(whole):
        start = number // size * size
        others = whole[start : start + size]
        found.append(own - (sum(others) - own) / (size - 1))
    if options.get("normalize_advantages"):
        mean = sum(found) / len(found)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in found) / (len(found) - 1))
        return [float(each - mean) / (deviation + 1e-4) for each in found]
    return [float(each) for each in found]


def dense_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].sum()


def textbook(rounds: list[tuple[Any, Any]], size: int, scale: float, options: dict[str, Any]) -> Any:
    """The losses, the gradients' norms and the weights of a training on what was written."""
    model, reference = build_model("llama").double(), build_model("llama").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    temperature, losses, norms = options.get("temperature", 1.0), [], []
    low, high = 1 - options.get("epsilon", 0.2), 1 + options.get("epsilon_high", options.get("epsilon", 0.2))
    for prompts, completions in rounds:
        pairs = list(zip(prompts, completions, strict=True))
        with torch.no_grad():
            old = torch.stack([dense_logprobs(model, *pair, temperature) for pair in pairs])
            base = torch.stack([dense_logprobs(reference, *pair, temperature) for pair in pairs])
        rewards = [scale * each for each in equal_in_every_second_group(completions, size)]
        counted = [ids[-1] == tokenizer().eos_token_id for ids in completions]
        kept = torch.tensor(counted if options.get("mask_truncated_completions") else [True] * len(counted))
        nats = [Fraction(each) for each in ((old - base) * kept).tolist()]
        advantages = torch.tensor(textbook_advantages(rewards, nats, size, options), dtype=torch.float64)
        for _ in range(ITERATIONS):
            ratio = torch.exp(torch.stack([dense_logprobs(model, *pair, temperature) for pair in pairs]) - old)
            each = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
            loss = -(each * kept).mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            losses.append(float(loss.detach()))
            optimizer.step()
    return losses, norms, dict(model.named_parameters())


@pytest.mark.parametrize("name", slow_but(["defaults", "clipped", "without a reference"], CASES))
def test_steps_are_those_of_the_textbook(name: str, tmp_path: Path):
    options = dict(CASES[name])
    scale, size, writer = options.pop("scale", 1.0), options.get("num_generations", 4), Writer()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [scale * each for each in equal_in_every_second_group(completion_ids, size)]

    run = {"num_generations": size, "num_iterations": ITERATIONS, "max_steps": ROUNDS * ITERATIONS, "weight_decay": 0.0}
    trainer = online(
        tmp_path,
        "RLOO",
        arguments={"reward_funcs": reward, "rollout_func": writer},
        **{"per_device_train_batch_size": 16, "max_completion_length": LONGEST, "learning_rate": LEARNING_RATE},
        **{**run, **options},
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms, weights = textbook(writer.rounds, size, scale, options)
    assert [entry["loss"] for entry in logs] == pytest.approx(losses, rel=1e-6, abs=1e-6 * scale)
    assert [entry["grad_norm"] for entry in logs] == pytest.approx(norms, rel=2e-5)
    assert max(norms[1::ITERATIONS]) > 0 or "epsilon" in options
    start = dict(build_model("llama").named_parameters())
    for key, value in trainer.model.named_parameters():
        moved = (weights[key] - start[key]).norm()
        assert (value - weights[key]).norm() <= 1e-4 * moved, (key, (value - weights[key]).norm() / moved)
