"""PPO against a plain dense computation of its formulas: padded rows, whole logits, a loop over each completion."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import lowtide
from lowtide.data.batches.values import KEPT, OLD, REFERENCE, RETURN, TOKEN_ADVANTAGE, VALUE
from lowtide.engine.forward import install
from lowtide.engine.heads.token_value import WithValues
from lowtide.methods.online.learning import GroupRewards, Rewarded
from lowtide.methods.online.ppo import METHOD, ByToken, objective
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rollout import Rollout
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.references.parity_world import build_model, lora, sums, tokenizer

PLAIN: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "max_completion_length": 12,
    "shuffle_dataset": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "k3, whitened rewards": {"kl_estimator": "k3", "whiten_rewards": True},
    "discounted": {"gamma": 0.9, "lam": 0.7},
    "missing end": {"missing_eos_penalty": 1.5, "vf_coef": 0.5},
    "tight clips": {"cliprange": 0.01, "cliprange_value": 0.005},
    "without a reference": {"kl_coef": 0.0},
    "another temperature": {"temperature": 1.3, "kl_coef": 0.3},
}


def config(folder: Any = "unused", **given: Any) -> Any:
    return lowtide.PPOConfig(output_dir=str(folder), **PLAIN | given)


@dataclass
class Written:
    """Completions of prompts, by their tokens."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: Tensor
    ended: list[bool]


def written(count: int = 8) -> Written:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.randint(2, 9))] for _ in range(count)]
    completions = [[rng.randrange(3, 300) for _ in range(rng.randint(1, 12))] for _ in range(count)]
    rewards = torch.tensor([rng.gauss(0, 1) for _ in range(count)], dtype=torch.float64)
    return Written(prompts, completions, rewards, [rng.random() < 0.5 for _ in range(count)])


def model_with_values(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    model: Any = build_model("llama")
    WithValues.attach(model)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter) if seed else 0
    model.value_head.weight.data.normal_(std=0.3)
    return model.to(dtype)


# -- the plain computation --------------------------------------------------------------------------------------------


def dense(model: Any, prompts: Any, completions: Any, temperature: float) -> list[tuple[Tensor, Tensor]]:
    """Of each completion: log-probabilities of its tokens, and the values before them."""
    rows = [torch.tensor(p + c) for p, c in zip(prompts, completions, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    logprobs = (model.lm_head(hidden) / temperature).log_softmax(-1)
    values = model.value_head(hidden)[..., 0]
    found = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        places = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        found.append((logprobs[row, places, torch.tensor(completion)], values[row, places]))
    return found


def whiten(values: Tensor, shift: bool = True) -> Tensor:
    new = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    return new if shift else new + values.mean()


def learned(what: Written, old: Any, reference: Any, args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) of each completion's tokens."""
    token_rewards, values = [], []
    for number, ((logprobs, value), (other, _)) in enumerate(zip(old, reference, strict=True)):
        ratio = other - logprobs
        divergence = -ratio if args.kl_estimator == "k1" else ratio.exp() - 1 - ratio
        rewards = -args.kl_coef * divergence
        score = what.rewards[number] - (0 if what.ended[number] else args.missing_eos_penalty or 0)
        token_rewards.append(torch.cat([rewards[:-1], rewards[-1:] + score]))
        values.append(value)
    sizes = [len(each) for each in values]
    if args.whiten_rewards:
        token_rewards = list(whiten(torch.cat(token_rewards), shift=False).split(sizes))
    advantages = []
    for rewards, value in zip(token_rewards, values, strict=True):
        after, found = torch.tensor(0.0), []
        for place in reversed(range(len(value))):
            following = value[place + 1] if place + 1 < len(value) else 0.0
            after = rewards[place] + args.gamma * following - value[place] + args.gamma * args.lam * after
            found.append(after)
        advantages.append(torch.stack(found[::-1]))
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return list(whiten(torch.cat(advantages)).split(sizes)), returns


def rollout_metrics(what: Written, old: Any, reference: Any, args: Any) -> dict[str, float]:
    """Means over completions of what their tokens sum up to; those that nothing rewarded have no score."""
    nats, surprises, scores = [], [], []
    for (logprobs, _), (other, _), reward, ended in zip(old, reference, what.rewards, what.ended, strict=True):
        ahead = logprobs - other if args.kl_coef else torch.zeros_like(logprobs)
        nats.append((ahead if args.kl_estimator == "k1" else torch.exp(-ahead) - 1 + ahead).sum().item())
        surprises.append(-logprobs.sum().item())
        scores.append(reward.item() - (0 if ended else args.missing_eos_penalty or 0))
    kl, known = sum(nats) / len(nats), [each for each in scores if each == each]
    return {
        "objective/kl": kl,
        "objective/entropy": sum(surprises) / len(surprises),
        "objective/non_score_reward": -args.kl_coef * kl,
        "objective/rlhf_reward": -args.kl_coef * kl + sum(known) / len(known),
        "objective/scores": sum(known) / len(known),
        "val/num_eos_tokens": sum(what.ended),
    }


def loss_of(new: Any, old: Any, advantages: Any, returns: Any, args: Any) -> Tensor:
    """The mean over the tokens of a mini-batch."""
    policy, value = [], []
    for (logprobs, values), (before, expected), advantage, wanted in zip(new, old, advantages, returns, strict=True):
        ratio = (logprobs - before).exp()
        cut = ratio.clamp(1 - args.cliprange, 1 + args.cliprange)
        policy.append(torch.maximum(-advantage * ratio, -advantage * cut))
        near = torch.clamp(values, expected - args.cliprange_value, expected + args.cliprange_value)
        value.append(0.5 * torch.maximum((values - wanted) ** 2, (near - wanted) ** 2))
    return torch.cat(policy).mean() + args.vf_coef * torch.cat(value).mean()


# -- one step ---------------------------------------------------------------------------------------------------------


def assert_same(found: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, msg=lambda text: f"{name}: {text}")


def rewarded_rollout(what: Written, old: Any, reference: Any) -> Rewarded:
    nothing = [[0.0] * len(each) for each in what.completions]
    completions = [
        Completion(ids, zeros, zeros, [True] * len(ids), "stop" if ended else "length")
        for ids, zeros, ended in zip(what.completions, nothing, what.ended, strict=True)
    ]
    rollout = Rollout(list(what.prompts), completions, 0)
    rollout.score_values = {
        OLD: torch.cat([each[0] for each in old]),
        VALUE: torch.cat([each[1] for each in old]),
        REFERENCE: torch.cat([each[0] for each in reference]),
    }
    group = GroupRewards(what.rewards[:, None], torch.ones(1), 1)
    return Rewarded(rollout, group, slice(0, len(rollout)), torch.device("cpu"))


@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_losses_and_gradients_are_those_of_the_dense_computation(name):
    args, what = config(**SETTINGS[name]), written()
    policy, writer, other = (model_with_values(seed) for seed in (0, 1, 2))
    with torch.no_grad():
        old, reference = (dense(each, what.prompts, what.completions, args.temperature) for each in (writer, other))
    advantages, returns = learned(what, old, reference, args)
    new = dense(policy, what.prompts, what.completions, args.temperature)
    loss = loss_of(new, old, advantages, returns, args)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()

    rewarded = rewarded_rollout(what, old, reference)
    found = ByToken().learn(rewarded, args)
    rewarded.rollout.score_values |= found.score_values
    torch.testing.assert_close(found.score_values[TOKEN_ADVANTAGE], torch.cat(advantages), rtol=0, atol=1e-8)
    torch.testing.assert_close(found.score_values[RETURN], torch.cat(returns), rtol=0, atol=1e-8)
    assert found.metrics == pytest.approx(rollout_metrics(what, old, reference, args), rel=1e-6)
    install(policy)
    for sharing, limits in (
        (True, Limits()),
        (True, Limits(rows=1)),
        (False, Limits(tokens=40)),
        (True, Limits(3, 50)),
    ):
        batch = ByToken().batch(rewarded.rollout, range(8), sharing=sharing)
        totals = Totals()
        actual = train_step(policy, batch, objective(args), limits=limits, totals=totals)
        torch.testing.assert_close(actual, loss.detach(), rtol=0, atol=1e-8)
        for key, p in policy.named_parameters():
            torch.testing.assert_close(
                p.grad, expected[key], rtol=1e-8, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}"
            )
        policy.zero_grad()
    padded = model_with_values(0)
    install(padded, padding_free=False)
    batch = ByToken().batch(rewarded.rollout, range(8), sharing=True)
    train_step(Models(padded, padding_free=False), batch, objective(args))
    for key, p in padded.named_parameters():
        assert_same(p.grad, expected[key], key)
    metrics = totals.read(torch.device("cpu"))
    assert metrics["loss/policy_avg"] + args.vf_coef * metrics["loss/value_avg"] == pytest.approx(loss.item())
    clipped = metrics["policy/clipfrac_avg"], metrics["val/clipfrac_avg"]
    assert name != "tight clips" or min(clipped) > 0.1


def test_completions_that_nothing_rewarded_teach_nothing():
    args, what = config(), written()
    writer = model_with_values(1)
    with torch.no_grad():
        old = dense(writer, what.prompts, what.completions, args.temperature)
    rest = Written(what.prompts[1:], what.completions[1:], what.rewards[1:], what.ended[1:])
    expected = ByToken().learn(rewarded_rollout(rest, old[1:], old[1:]), args)
    what.rewards[0] = torch.nan
    found = ByToken().learn(rewarded_rollout(what, old, old), args)
    size = len(what.completions[0])
    assert found.metrics == pytest.approx(rollout_metrics(what, old, old, args), rel=1e-6)
    assert found.values[0] == 0
    assert found.score_values[KEPT].tolist() == [False] * size + [True] * (len(found.score_values[KEPT]) - size)
    actual = found.score_values[TOKEN_ADVANTAGE]
    assert not actual[:size].any()
    torch.testing.assert_close(actual[size:], expected.score_values[TOKEN_ADVANTAGE])


# -- whole runs -------------------------------------------------------------------------------------------------------


class Writer:
    """A `rollout_func`: completions of random tokens, some of which end."""

    def __init__(self) -> None:
        self.rng = random.Random(5)
        self.made: list[tuple[list[int], list[int]]] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [tokenizer()(prompt)["input_ids"] for prompt in prompts]
        ids = [[self.rng.randrange(3, 300) for _ in range(self.rng.randint(2, 11))] for _ in prompts]
        ids = [each + [tokenizer().eos_token_id] * (self.rng.random() < 0.5) for each in ids]
        self.made += zip(prompt_ids, ids, strict=True)
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}


def score(ids: list[int]) -> float:
    return (sum(ids) % 11 - 5) / 5


def rewards(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [score(ids) for ids in completion_ids]


def saved(folder: Path) -> str:
    build_model("llama").save_pretrained(str(folder / "model"))
    return str(folder / "model")


def trainer_of(folder: Path, writer: Any = None, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    settings = {"num_ppo_epochs": 2, "num_mini_batches": 2, "save_strategy": "no"} | (settings or {})
    return lowtide.PPOTrainer(
        model=saved(folder),
        reward_funcs=rewards,
        args=config(folder / "out", **settings),
        train_dataset=Dataset.from_list([{"prompt": question} for question, _ in sums(40)]),
        processing_class=tokenizer(),
        **({"rollout_func": writer} if writer else {}) | more,
    )


def test_ten_steps_are_those_of_the_dense_computation(tmp_path):
    writer = Writer()
    trainer = trainer_of(tmp_path, writer, {"max_steps": 10, "missing_eos_penalty": 0.5})
    args = trainer.args
    policy: Any = AutoModelForCausalLM.from_pretrained(saved(tmp_path), dtype=torch.float32)
    WithValues.attach(policy)
    policy.value_head.load_state_dict(trainer.model.value_head.state_dict())
    trainer.train()
    actual = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    policy.train()
    frozen = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
    expected: list[float] = []
    for rollout in range(3):
        pairs = writer.made[8 * rollout : 8 * rollout + 8]
        prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
        ended = [ids[-1] == tokenizer().eos_token_id for ids in completions]
        what = Written(prompts, completions, torch.tensor([score(ids) for ids in completions]), ended)
        with torch.no_grad():
            old = dense(policy, prompts, completions, args.temperature)
            reference = dense(frozen, prompts, completions, args.temperature)
        advantages, returns = learned(what, old, reference, args)
        for epoch in range(2):
            order = ByToken().order(8, args.seed, 0, rollout, epoch)
            for rows in (order[:4], order[4:]):
                chosen = [[each[row] for row in rows] for each in (prompts, completions, old, advantages, returns)]
                loss = loss_of(dense(policy, *chosen[:2], args.temperature), *chosen[2:], args)
                expected.append(loss.item())
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected[:10]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_run_that_resumes_in_the_middle_of_a_rollout_ends_with_the_same_bits(tmp_path):
    """A rollout is learned from in 4 steps, and step 6 is the second of the second one."""
    settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 6}
    whole = trainer_of(tmp_path / "whole", settings=settings)
    whole.train()
    checkpoint = tmp_path / "whole" / "out" / "checkpoint-6"
    assert "value_head.weight" in load_file(checkpoint / "model.safetensors")
    resumed = trainer_of(tmp_path / "resumed", settings=settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for (name, one), (_, other) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_adapters_train_the_value_head_whole_and_are_saved_with_it(tmp_path):
    trainer = trainer_of(tmp_path, settings={"max_steps": 4}, peft_config=lora())
    before = trainer.model.base_model.model.value_head.modules_to_save["default"].weight.clone()
    trainer.train()
    after = trainer.model.base_model.model.value_head.modules_to_save["default"].weight
    assert not torch.equal(before, after)
    trainer.save_model(str(tmp_path / "adapter"))
    saved_weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (name,) = [name for name in saved_weights if name.endswith("value_head.weight")]
    assert torch.equal(saved_weights[name], after)
    assert all(entry["objective/kl"] == entry["objective/kl"] for entry in trainer.state.log_history[:1])


def test_the_value_head_of_a_saved_model_is_found_again(tmp_path):
    trainer = trainer_of(tmp_path, settings={"max_steps": 2})
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    model: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / "trained"))
    WithValues.attach(model)
    assert torch.equal(model.value_head.weight, trainer.model.value_head.weight)


def test_a_value_model_starts_the_value_head(tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path), num_labels=1)
    trainer = trainer_of(tmp_path, value_model=classifier)
    assert torch.equal(trainer.model.value_head.weight, classifier.score.weight)
    small = copy.deepcopy(classifier)
    small.score = torch.nn.Linear(3, 1)
    with pytest.raises(ValueError, match="hidden size"):
        trainer_of(tmp_path, value_model=small)


def test_options():
    assert config(response_length=20, max_completion_length=53).max_completion_length == 20
    assert config(num_mini_batches=3, gradient_accumulation_steps=2).steps_of_generation == 6
    assert config(total_episodes=20, num_mini_batches=2, num_ppo_epochs=3).max_steps == 18
    assert METHOD.writes is not None
    for given, text in (
        ({"steps_per_generation": 4}, "num_mini_batches"),
        ({"num_iterations": 3}, "num_ppo_epochs"),
        ({"response_length": 20, "max_completion_length": 30}, "older name"),
        ({"stop_token": "eos", "stop_token_id": 3}, "stop_token_id"),
        ({"kl_coef": 0.0, "sync_ref_model": True}, "kl_coef"),
        ({"total_episodes": 20, "max_steps": 3}, "total_episodes"),
        ({"kl_estimator": "k2"}, "kl_estimator"),
    ):
        with pytest.raises(ValueError, match=text):
            config(**given)
