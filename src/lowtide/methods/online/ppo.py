"""Proximal policy optimization (arXiv 1707.06347; for language models 2203.02155): each token is an action, and a value
function on the policy's trunk, or on the base of its adapter, says what was to be expected.

TRL 1.16 has none any more: names, defaults and metrics are those of its PPOTrainer before 1.0. It deviates in three
ways: the value function shares the trunk, or the base, rather than being a second model, moments are of all ranks
together, and the reward stands at the last token that the policy wrote.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.data.batches.values import KEPT, OLD, REFERENCE, RETURN, TOKEN_ADVANTAGE, VALUE
from lowtide.engine.heads.head import Stats
from lowtide.engine.heads.token_value import TokenValue, WithValues
from lowtide.engine.heads.value import VALUES
from lowtide.methods.method import Method, RowObjective
from lowtide.methods.online.learning import Learned, Learning, Rewarded, Values
from lowtide.methods.online.policy import completion_counts
from lowtide.methods.online.rollouts import Prompts, ReferredOptions
from lowtide.methods.shared.options import VisionOptions
from lowtide.methods.shared.paper import Paper
from lowtide.objectives.advantages import weighted
from lowtide.objectives.outcome import Counts, Mean, Outcome
from lowtide.objectives.ppo import (
    ESTIMATORS,
    Acted,
    Expected,
    estimated_advantages,
    policy_losses,
    token_rewards,
    value_losses,
    whitened,
)
from lowtide.ops.float64 import to_float64
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, option
from lowtide.ragged import RaggedBatch


@dataclass(kw_only=True)
class PPOOptions(ReferredOptions, VisionOptions):
    """The options of proximal policy optimization, under the names and with the defaults of TRL before 1.0."""

    divergence_weight: ClassVar[str] = "kl_coef"
    without_effect: ClassVar[Mapping[str, str]] = {
        **ReferredOptions.without_effect,
        "stop_token": "completions end at the tokenizer's end token in any case",
        "local_rollout_forward_batch_size": "rollouts are scored within the limits of a micro-batch",
        "num_sample_generations": "log_completions=True shows what is written",
        "sft_model_path": "the policy is the trainer's `model`, and without `ref_model` the reference is as it begins",
    }

    learning_rate: float = option(5e-5, "The initial learning rate.")
    disable_dropout: bool = option(True, "Train without dropout, so that ratios are of the policy alone.")
    num_generations: int = option(1, "Completions of a prompt.", COUNT)
    max_completion_length: int = option(53, "Most tokens of a completion.", COUNT)
    response_length: int | None = option(None, "Older name of `max_completion_length`.", COUNT)
    temperature: float = option(0.7, "Divisor of the logits, in writing and in scoring.", NOT_NEGATIVE)
    num_ppo_epochs: int = option(4, "How often each completion is learned from.", COUNT)
    num_mini_batches: int = option(1, "Optimizer steps that a rollout is divided into.", COUNT)
    total_episodes: int | None = option(None, "Completions after which training ends, in place of `max_steps`.", COUNT)
    kl_coef: float = option(
        0.05, "Weight of the divergence from the reference in rewards; 0 goes without one.", NOT_NEGATIVE
    )
    kl_estimator: str = option(
        "k1", "How it is estimated: k1 is the log-ratio, k3 is never negative.", choices=[*ESTIMATORS]
    )
    cliprange: float = option(0.2, "How far a ratio may be from 1 before it is clipped.", POSITIVE)
    cliprange_value: float = option(0.2, "How far a value may move before it is clipped.", POSITIVE)
    vf_coef: float = option(0.1, "Weight of the value function's loss.", NOT_NEGATIVE)
    gamma: float = option(1.0, "Discount of rewards a token.", SHARE)
    lam: float = option(0.95, "Weight of longer advantage estimates (GAE).", SHARE)
    value_adapter: bool = option(
        False,
        "Give the value function a LoRA adapter of its own on the frozen base: it shares no trained weight with the "
        "policy, for a second forward and backward.",
    )
    whiten_rewards: bool = option(False, "Bring token rewards to a variance of 1.")
    missing_eos_penalty: float | None = option(
        None, "Taken from the reward of a completion that was cut off before its end token.", POSITIVE
    )
    stop_token: str | None = option(None, "Without effect.", choices=["eos"])
    stop_token_id: int | None = option(None, "A further token that ends completions.", NOT_NEGATIVE)
    reward_model_path: str | None = option(None, "A reward model, where no `reward_funcs` are passed.")
    sft_model_path: str | None = option(None, "Without effect.")
    local_rollout_forward_batch_size: int | None = option(None, "Without effect.", COUNT)
    num_sample_generations: int | None = option(None, "Without effect.", NOT_NEGATIVE)
    vllm_importance_sampling_correction: bool = option(False, "Not in PPO: ratios are of what the policy itself says.")

    @property
    def steps_of_generation(self) -> int:
        """Micro-batches, as Trainer counts them, that learn once from what is written at a time."""
        return self.gradient_accumulation_steps * self.num_mini_batches  # type: ignore[attr-defined]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.take_older("response_length", "max_completion_length")
        for name in ("steps_per_generation", "generation_batch_size"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} would contradict num_mini_batches={self.num_mini_batches}, which "
                    "says how many optimizer steps a rollout is divided into: leave it out"
                )
        if self.num_iterations not in (1, self.num_ppo_epochs):
            raise ValueError(f"num_iterations={self.num_iterations} is called num_ppo_epochs here: set that alone")
        self.num_iterations = self.num_ppo_epochs
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError("stop_token and stop_token_id both say what ends a completion: set one of them")
        if self.sync_ref_model and not self.compares:
            raise ValueError("sync_ref_model=True moves a reference, and kl_coef=0 has none: set kl_coef above 0")
        self.check_rollouts()
        self._end_after_episodes()

    def _end_after_episodes(self) -> None:
        if self.total_episodes is None:
            return
        rollouts = math.ceil(self.total_episodes / self.written_at_a_time)
        steps, known = rollouts * self.num_mini_batches * self.num_ppo_epochs, self.max_steps  # type: ignore
        if known not in (-1, steps):
            raise ValueError(
                f"total_episodes={self.total_episodes} makes {steps} optimizer steps, and max_steps={known}: set one"
            )
        self.max_steps = steps

    def sampling(self, stop_ids: Sequence[int] = ()) -> object:
        more = [] if self.stop_token_id is None else [self.stop_token_id]
        return super().sampling([*stop_ids, *more])


class ByToken(Learning):
    """Rewards at the end and penalties on the way become an advantage of each token."""

    reads = TokenValue

    def wants_old(self, options: PPOOptions, *, stale: bool) -> bool:
        return True

    def learn(self, rewarded: Rewarded, options: PPOOptions) -> Learned:
        group, steps = rewarded.group, rewarded.own_steps
        total, at_end = (weighted(each, group.weights) for each in (group.rewards, group.outcomes))
        ended = rewarded.ended
        if options.missing_eos_penalty is not None:
            penalty = options.missing_eos_penalty * (~ended).to(total)
            total, at_end = total - penalty, at_end.nan_to_num(nan=0.0) - penalty
        known, lengths = rewarded.rollout.score_values, rewarded.lengths
        kept = (~total[rewarded.own].isnan()).repeat_interleave(torch.tensor(lengths))
        old, values = known[OLD].double(), known[VALUE].double()
        divergence = torch.zeros_like(old)
        if options.compares:
            divergence = ESTIMATORS[options.kl_estimator](old, known[REFERENCE].double())
        score = at_end[rewarded.own].double().nan_to_num(nan=0.0)
        rewards = token_rewards(options.kl_coef * divergence, score, lengths)
        rewards = rewards + steps.at_scores(steps.value * group.weights[steps.function], rewarded.rollout.scored)
        if options.whiten_rewards:
            rewards = whitened(rewards, *moments(rewards, kept, rewarded), shift_mean=False)
        advantages = estimated_advantages(rewards, values, lengths, gamma=options.gamma, lam=options.lam)
        returns = advantages + values
        advantages = whitened(advantages, *moments(advantages, kept, rewarded)) * kept
        reported = lengths[: rewarded.own_reported]
        tokens = sum(reported)
        sums = sum(length > 0 for length in reported), divergence[:tokens].sum(), -old[:tokens].sum()
        count, nats, surprise = rewarded.summed(*sums)
        scores = total[: rewarded.reported].nanmean().item()
        penalty = -options.kl_coef * nats / max(count, 1)
        return Learned(
            total.nan_to_num(nan=0.0),
            score_values={
                RETURN: returns.to(known[VALUE].dtype),
                TOKEN_ADVANTAGE: advantages.to(known[VALUE].dtype),
                KEPT: kept,
            },
            metrics={
                "objective/kl": nats / max(count, 1),
                "objective/entropy": surprise / max(count, 1),
                "objective/non_score_reward": penalty,
                "objective/rlhf_reward": penalty + scores,
                "objective/scores": scores,
                "val/num_eos_tokens": float(ended[: rewarded.reported].sum()),
            },
        )

    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        zeros = {name: torch.zeros(scores) for name in (OLD, VALUE, RETURN, TOKEN_ADVANTAGE)}
        return {}, {**zeros, KEPT: torch.ones(scores, dtype=torch.bool)}

    def order(self, rows: int, *key: int) -> Sequence[int]:
        """Another order each time that a rollout is learned from."""
        order = list(range(rows))
        random.Random(repr(key)).shuffle(order)
        return order


def moments(values: Float[Tensor, " scores"], kept: Bool[Tensor, " scores"], rewarded: Rewarded) -> tuple[float, float]:
    """Mean and variance of the tokens of all ranks that take part, with one degree of freedom less; of equal values
    exactly that value and 0."""
    smallest = rewarded.smallest(values[kept])
    total, count = rewarded.summed(((values - smallest) * kept).sum(), kept.sum())
    mean = smallest + total / max(count, 1)
    (squares,) = rewarded.summed(((values - mean) ** 2 * kept).sum())
    return mean, squares / max(count - 1, 1)


@dataclass(frozen=True)
class ActedAndExpected:
    """Both, from one forward."""

    acted: Acted
    expected: Expected


def read_acted(batch: RaggedBatch, stats: Stats, reference: Tensor | None = None) -> Acted:
    """The tokens of a batch whose rows are completions."""
    logprobs = stats["logprobs"]
    old, advantages = (batch.score_values[name].to(logprobs.dtype) for name in (OLD, TOKEN_ADVANTAGE))
    return Acted(logprobs, old, advantages, batch.score_values[KEPT].bool(), stats.get("entropies"))


def read_expected(batch: RaggedBatch, stats: Stats, reference: Tensor | None = None) -> Expected:
    """Likewise, what was expected before them."""
    values = stats[VALUES]
    old, returns = (batch.score_values[name].to(values.dtype) for name in (VALUE, RETURN))
    return Expected(values, old, returns, batch.score_values[KEPT].bool())


def read_both(batch: RaggedBatch, stats: Stats, reference: Tensor | None = None) -> ActedAndExpected:
    return ActedAndExpected(read_acted(batch, stats), read_expected(batch, stats))


def policy_loss(acted: Acted, counts: Counts, *, options: PPOOptions) -> Outcome:
    """The mean over the step's tokens of the policy's loss."""
    losses, clipped = policy_losses(acted, options.cliprange)
    means = {
        "policy/approxkl_avg": _mean(((acted.logprobs - acted.old) ** 2) / 2, acted.kept),
        "policy/clipfrac_avg": _mean(clipped, acted.kept),
        "loss/policy_avg": _mean(losses, acted.kept),
        "val/ratio": _mean(acted.ratio, acted.kept),
    }
    if acted.entropies is not None:
        means["policy/entropy_avg"] = _mean(acted.entropies, acted.kept)
    return Outcome((losses * acted.kept).sum() / max(counts["kept"], 1), means)


def value_loss(expected: Expected, counts: Counts, *, options: PPOOptions) -> Outcome:
    """Likewise of the value function, at its weight."""
    losses, clipped = value_losses(expected, options.cliprange_value)
    means = {"loss/value_avg": _mean(losses, expected.kept), "val/clipfrac_avg": _mean(clipped, expected.kept)}
    return Outcome(options.vf_coef * (losses * expected.kept).sum() / max(counts["kept"], 1), means)


def both_losses(both: ActedAndExpected, counts: Counts, *, options: PPOOptions) -> Outcome:
    policy, value = policy_loss(both.acted, counts, options=options), value_loss(both.expected, counts, options=options)
    return Outcome(policy.loss + value.loss, {**policy.means, **value.means})


def _mean(values: Tensor, kept: Bool[Tensor, " scores"]) -> Mean:
    """Over the tokens that take part."""
    return Mean(to_float64((values.detach() * kept).sum()), kept.sum())


def objective(options: PPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The losses of the options over the tokens of completions."""
    policy = RowObjective(
        read=read_acted,
        loss=partial(policy_loss, options=options),
        counts=completion_counts,
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        temperature=options.temperature,
    )
    if not options.value_adapter:
        return replace(policy, read=read_both, loss=partial(both_losses, options=options), head=WithValues)
    value = partial(value_loss, options=options)
    return replace(policy, beside=RowObjective(read_expected, value, completion_counts, head=TokenValue))


ARGUMENTS = (
    *("model", "ref_model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "value_model", "data_collator", "callbacks", "optimizers", "quantization_config"),
    *("peft_config", "tools", "rollout_func", "environment_factory", "optimizer_cls_and_kwargs"),
)
PAPER = Paper(
    "schulman2017proximal",
    "Proximal Policy Optimization Algorithms",
    ("John Schulman", "Filip Wolski", "Prafulla Dhariwal", "Alec Radford", "Oleg Klimov"),
    2017,
    "1707.06347",
)
METHOD = Method(
    "ppo",
    "proximal policy optimization",
    PPOOptions,
    Prompts(ByToken(), with_images=True),
    objective,
    PAPER,
    head=WithValues,
    arguments=ARGUMENTS,
)
