"""Optimal advantage regression, A*-PO (arXiv 2505.20686): the value that the best policy near the reference has at each
prompt is estimated before training; then one completion a prompt is written, and how much likelier it has become is
regressed on how far its reward is above that value.

Names and defaults are those of TRL 1.16's experimental `A2POTrainer`, and so are estimates and loss. It deviates in
what becomes of completions that nothing rewards: they are left out, of the estimate and of the loss.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.data.batches.values import ADVANTAGE
from lowtide.data.prompts import OPTIMAL_VALUE
from lowtide.engine.heads.head import Stats
from lowtide.methods.method import Method, RowObjective
from lowtide.methods.online.learning import Learned, Learning, Rewarded, Survey, Values
from lowtide.methods.online.policy import completion_counts
from lowtide.methods.online.rollouts import Prompts, ReferredOptions
from lowtide.methods.shared.completions import row_sums
from lowtide.methods.shared.paper import Paper
from lowtide.objectives.advantages import optimal_values, weighted
from lowtide.objectives.outcome import Counts, Outcome, mean_of
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, POSITIVE, option
from lowtide.ragged import RaggedBatch


@dataclass(kw_only=True)
class A2POOptions(ReferredOptions):
    """The options of optimal advantage regression, under TRL's names and with its defaults."""

    divergence_weight: ClassVar[str] = "beta2"

    learning_rate: float = option(5e-5, "The initial learning rate.")
    num_generations: int = option(1, "Completions of a prompt. TRL's is always 1.", COUNT)
    max_prompt_length: int | None = option(512, "Most tokens of a prompt; its end is kept.", COUNT)
    max_completion_length: int = option(256, "Most tokens of a completion.", COUNT)
    temperature: float = option(1.0, "Divisor of the logits in writing; log-probabilities are at 1.", POSITIVE)
    num_value_samples: int = option(
        8, "Completions of each prompt that are written before training, of which its value is estimated.", COUNT
    )
    beta1: float = option(
        0.5,
        "How near the best policy, whose values are estimated, is to the reference.",
        POSITIVE,
    )
    beta2: float = option(1e-3, "Reward of a nat by which a completion is likelier than to the reference.", POSITIVE)
    filter_all_incorrect: bool = option(
        True, "Leave out prompts of which all completions before training have a reward of 0."
    )
    vllm_importance_sampling_correction: bool = option(False, "Not in A*-PO, which has no importance ratio.")

    @property
    def scored_at(self) -> float:
        return 1.0

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_rollouts()
        if self.sync_ref_model:
            raise ValueError(
                "sync_ref_model=True moves the reference, and the values of prompts are estimated before training of "
                "what it writes: leave it out"
            )
        if self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction=True is GRPO's: A*-PO has no importance ratio. Leave it out"
            )


class Regression(Learning):
    """A completion is worth how far its reward is above the value of its prompt."""

    def wants_old(self, options: A2POOptions, *, stale: bool) -> bool:
        return False

    def survey(self, options: A2POOptions) -> Survey:
        return Survey(
            options.num_value_samples,
            OPTIMAL_VALUE,
            functools.partial(optimal_values, beta=options.beta1),
            all_failed if options.filter_all_incorrect else None,
        )

    def learn(self, rewarded: Rewarded, options: A2POOptions) -> Learned:
        values = torch.tensor([row[OPTIMAL_VALUE] for row in rewarded.rows], dtype=torch.float64)
        group = rewarded.group
        target = weighted(group.rewards, group.weights)[rewarded.own] - values
        reported = values[: rewarded.own_reported]
        total, count = rewarded.summed(reported.nansum(), len(reported))
        return Learned(
            rewarded.of_all_ranks(target.nan_to_num(nan=0.0)),
            {ADVANTAGE: target.float()},
            metrics={"v_star": total / max(count, 1)},
        )

    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        return {ADVANTAGE: torch.ones(completions)}, {}


def all_failed(rewards: Float[Tensor, "prompts completions"]) -> Bool[Tensor, " prompts"]:
    """Whether no completion of a prompt has another reward than 0."""
    return (rewards.nan_to_num(nan=0.0) == 0).all(1)


@dataclass(frozen=True)
class Likelier:
    """What is known of completions, and of what was regressed on."""

    ahead: Float[Tensor, " completions"]
    """How much likelier each is to the policy than to the reference, in nats, with gradients."""
    target: Float[Tensor, " completions"]
    """How far its reward is above the value of its prompt; NaN where nothing is learned of it."""


def read_likelier(batch: RaggedBatch, stats: Stats, reference: Float[Tensor, " scores"] | None) -> Likelier:
    """The completions of a batch, which are its rows."""
    logprobs = stats["logprobs"]
    target = batch.row_values[ADVANTAGE].to(logprobs.dtype)
    if reference is None:  # nothing is scored
        return Likelier(logprobs.new_zeros(batch.rows), torch.full_like(target, torch.nan))
    written = row_sums(torch.ones_like(logprobs.detach()), batch)
    ahead = row_sums(logprobs - reference.to(logprobs.dtype), batch)
    return Likelier(ahead, target.masked_fill(written == 0, torch.nan))


def loss(likelier: Likelier, counts: Counts, *, beta: float) -> Outcome:
    """The squared error of the implicit reward, over the completions of the step."""
    known, implicit = ~likelier.target.isnan(), beta * likelier.ahead
    target = likelier.target.nan_to_num(nan=0.0)
    squares = (implicit - target).square() * known
    means = {"implicit_reward": mean_of(implicit, known), "advantage": mean_of(target, known)}
    return Outcome(squares.sum() / counts["completions"], means)


def objective(options: A2POOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over completions."""
    return RowObjective(
        read=read_likelier,
        loss=functools.partial(loss, beta=options.beta2),
        counts=completion_counts,
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        needs_reference=True,
    )


ARGUMENTS = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers"),
    *("reward_processing_classes", "peft_config", "quantization_config", "tools", "rollout_func"),
    *("environment_factory", "optimizer_cls_and_kwargs"),
)
PAPER = Paper(
    "brantley2025accelerating",
    "Accelerating RL for LLM Reasoning with Optimal Advantage Regression",
    ("Kianté Brantley", "Mingyu Chen", "Zhaolin Gao", "Jason D. Lee", "Wen Sun", "others"),
    2025,
    "2505.20686",
)
METHOD = Method(
    "a2po",
    "optimal advantage regression",
    A2POOptions,
    Prompts(Regression()),
    objective,
    PAPER,
    arguments=ARGUMENTS,
)
