"""Proximal policy optimization (arXiv 1707.06347; for language models 2203.02155): each token is an action, and a value
function on the policy's trunk says what was to be expected.

TRL 1.16 has none any more: names, defaults and metrics are those of its PPOTrainer before 1.0. It deviates in three
ways: the value function shares the trunk rather than being a second model, moments are of all ranks together, and the
reward stands at the last token that the policy wrote.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.data.batches.values import KEPT, OLD, REFERENCE, RETURN, TOKEN_ADVANTAGE, VALUE
from lowtide.engine.heads.token_value import TokenValue, ValuedTokens, WithValues
from lowtide.methods.learning import Learned, Learning, Rewarded, Values
from lowtide.methods.method import Method, RowObjective
from lowtide.methods.paper import Paper
from lowtide.methods.policy import completion_counts
from lowtide.methods.rollouts import Prompts, RolloutOptions
from lowtide.objectives.advantages import weighted
from lowtide.objectives.outcome import Counts, Mean, Outcome
from lowtide.objectives.ppo import (
    ESTIMATORS,
    Acted,
    estimated_advantages,
    policy_losses,
    token_rewards,
    value_losses,
    whitened,
)
from lowtide.ops.float64 import to_float64
from lowtide.ops.linear_logprobs import Want
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, option
from lowtide.ragged import RaggedBatch


@dataclass(kw_only=True)
class PPOOptions(RolloutOptions):
    """The options of proximal policy optimization, under the names and with the defaults of TRL before 1.0."""

    divergence_weight: ClassVar[str] = "kl_coef"
    without_effect: ClassVar[Mapping[str, str]] = {
        **RolloutOptions.without_effect,
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
        total = weighted(rewarded.group.rewards, rewarded.group.weights)
        ended = rewarded.ended
        if options.missing_eos_penalty is not None:
            total = total - options.missing_eos_penalty * (~ended).to(total)
        known, lengths = rewarded.rollout.score_values, rewarded.lengths
        score = total[rewarded.own].double()
        kept = (~score.isnan()).repeat_interleave(torch.tensor(lengths))
        old, values = known[OLD].double(), known[VALUE].double()
        divergence = torch.zeros_like(old)
        if options.compares:
            divergence = ESTIMATORS[options.kl_estimator](old, known[REFERENCE].double())
        rewards = token_rewards(options.kl_coef * divergence, score.nan_to_num(nan=0.0), lengths)
        if options.whiten_rewards:
            rewards = whitened(rewards, *_moments(rewards, kept, rewarded), shift_mean=False)
        advantages = estimated_advantages(rewards, values, lengths, gamma=options.gamma, lam=options.lam)
        returns = advantages + values
        advantages = whitened(advantages, *_moments(advantages, kept, rewarded)) * kept
        count, nats, surprise = rewarded.summed(len(lengths), divergence.sum(), -old.sum())
        scores = total.nanmean().item()
        penalty = -options.kl_coef * nats / count
        return Learned(
            total.nan_to_num(nan=0.0),
            score_values={
                RETURN: returns.to(known[VALUE].dtype),
                TOKEN_ADVANTAGE: advantages.to(known[VALUE].dtype),
                KEPT: kept,
            },
            metrics={
                "objective/kl": nats / count,
                "objective/entropy": surprise / count,
                "objective/non_score_reward": penalty,
                "objective/rlhf_reward": penalty + scores,
                "objective/scores": scores,
                "val/num_eos_tokens": float(ended.sum()),
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


def _moments(
    values: Float[Tensor, " scores"], kept: Bool[Tensor, " scores"], rewarded: Rewarded
) -> tuple[float, float]:
    """Mean and variance of the tokens of all ranks that take part, with one degree of freedom less."""
    total, count = rewarded.summed((values * kept).sum(), kept.sum())
    mean = total / max(count, 1)
    (squares,) = rewarded.summed(((values - mean) ** 2 * kept).sum())
    return mean, squares / max(count - 1, 1)


def read_acted(batch: RaggedBatch, stats: ValuedTokens, reference: Tensor | None) -> Acted:
    """The tokens of a batch whose rows are completions."""
    known = {name: values.to(stats.values.dtype) for name, values in batch.score_values.items()}
    return Acted(
        stats.tokens.logprobs,
        stats.values,
        known[OLD],
        known[VALUE],
        known[TOKEN_ADVANTAGE],
        known[RETURN],
        batch.score_values[KEPT].bool(),
        stats.tokens.entropies,
    )


def loss(acted: Acted, counts: Counts, *, options: PPOOptions) -> Outcome:
    """The mean over the step's tokens of the policy's loss, and of the value function's at its weight."""
    policy, policy_clipped = policy_losses(acted, options.cliprange)
    value, value_clipped = value_losses(acted, options.cliprange_value)
    taking_part, ratio = acted.kept.to(policy.dtype), acted.ratio.detach()

    def mean(values: Tensor) -> Mean:
        return Mean(to_float64((values.detach() * taking_part).sum()), acted.kept.sum())

    means = {
        "policy/approxkl_avg": mean(((acted.logprobs - acted.old) ** 2) / 2),
        "policy/clipfrac_avg": mean(policy_clipped.to(policy.dtype)),
        "loss/policy_avg": mean(policy),
        "loss/value_avg": mean(value),
        "val/clipfrac_avg": mean(value_clipped.to(policy.dtype)),
        "val/ratio": mean(ratio),
    }
    if acted.entropies is not None:
        means["policy/entropy_avg"] = mean(acted.entropies)
    total = ((policy + options.vf_coef * value) * taking_part).sum() / max(counts["kept"], 1)
    return Outcome(total, means)


def objective(options: PPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The losses of the options over the tokens of completions."""
    return RowObjective(
        read=read_acted,
        loss=partial(loss, options=options),
        counts=completion_counts,
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        temperature=options.temperature,
        head=WithValues,
    )


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
    Prompts(ByToken()),
    objective,
    PAPER,
    head=WithValues,
    arguments=ARGUMENTS,
)
