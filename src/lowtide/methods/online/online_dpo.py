"""Online direct preference optimization (arXiv 2402.04792): the policy writes two completions of a prompt, and the one
that a judge or rewards prefer is the chosen one of a pair for DPO.

Names, defaults and metrics are TRL 1.16's; the judge is that of its earlier versions. It deviates where TRL's padding
shows: `max_length` cuts each prompt by its own pair, and metrics count no padding. Pairs whose better completion
cannot be told teach nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.data.batches.values import BETA, DECIDED, LENGTHS, PREFERENCE, REWARD
from lowtide.engine.heads.head import Stats
from lowtide.methods.method import Method, RowObjective
from lowtide.methods.online.learning import Learned, Learning, Rewarded, Values
from lowtide.methods.online.rollouts import Prompts, ReferredOptions
from lowtide.methods.shared.completions import completion_sums
from lowtide.methods.shared.options import VisionOptions
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.preference import read_pairs
from lowtide.objectives.advantages import above_smallest, summed_up, weighted
from lowtide.objectives.outcome import Counts, Mean, Outcome, mean_of
from lowtide.objectives.preference import LOSSES, Pairs
from lowtide.ops.float64 import to_float64
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range, option
from lowtide.ragged import RaggedBatch
from lowtide.rollout.rollout import Rollout

TRAINED_WITH = ("sigmoid", "ipo")


@dataclass(kw_only=True)
class OnlineDPOOptions(ReferredOptions, VisionOptions):
    """The options of online direct preference optimization, under TRL's names and with its defaults."""

    completions_of_row: ClassVar[int] = 2

    learning_rate: float = option(5e-7, "The initial learning rate.")
    disable_dropout: bool = option(True, "Train without dropout, so that policy and reference are comparable.")
    num_generations: int = option(2, "Completions of a prompt: two.", Range(least=2, most=2))
    max_completion_length: int = option(64, "Most tokens of a completion.", COUNT)
    max_new_tokens: int | None = option(None, "TRL's name of `max_completion_length`.", COUNT)
    max_length: int | None = option(
        512, "Most tokens of a prompt with its longer completion; the prompt's end is kept. None is no limit.", COUNT
    )
    temperature: float = option(0.9, "Divisor of the logits in writing; pairs are scored at 1.", NOT_NEGATIVE)
    beta: float | list[float] = option(
        0.1, "How closely the policy keeps to the reference, or that of each epoch; tau of IPO.", POSITIVE
    )
    loss_type: str = option("sigmoid", "The loss of pairs: DPO's or IPO's.", choices=[*TRAINED_WITH])
    ld_alpha: float | None = option(
        None, "Weight of tokens beyond the shorter completion's length (LD-DPO). None leaves them whole.", SHARE
    )
    missing_eos_penalty: float | None = option(
        None, "Taken from the reward of a completion that was cut off before its end token.", POSITIVE
    )
    reward_model_path: str | None = option(None, "A reward model, where no `reward_funcs` are passed.")
    vllm_gpu_memory_utilization: float = option(0.55, "The share of the GPU that vLLM takes, colocated.", SHARE)

    @property
    def compares(self) -> bool:
        """There is always a reference."""
        return True

    @property
    def scored_at(self) -> float:
        """Pairs are scored without temperature, as in TRL."""
        return 1.0

    @property
    def uncut_prompt_tokens(self) -> int | None:
        return None if self.max_length is None else self.max_length - self.max_completion_length

    def beta_of(self, epoch: float) -> float:
        """That of an epoch; the last one goes on."""
        betas = self.beta if isinstance(self.beta, list) else [self.beta]
        return betas[min(int(epoch), len(betas) - 1)]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.take_older("max_new_tokens", "max_completion_length")
        if isinstance(self.beta, list) and not self.beta:
            raise ValueError("beta is an empty list: give one number, or one for each epoch")
        if self.num_generations_eval not in (None, 2):
            raise ValueError(f"num_generations_eval={self.num_generations_eval} must be 2, since pairs are compared")
        if self.max_length is not None and self.max_completion_length >= self.max_length:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} leaves no token of a prompt within "
                f"max_length={self.max_length}: raise max_length, or lower max_completion_length (max_new_tokens)"
            )
        self.check_rollouts()


class Preferred(Learning):
    """Of the two completions of a prompt the one with the larger reward is chosen; of two that are equal the first."""

    completions = 2

    def wants_old(self, options: OnlineDPOOptions, *, stale: bool) -> bool:
        return False

    def prepare(self, rollout: Rollout, options: OnlineDPOOptions) -> None:
        """Cuts the start of prompts that are too long with their longer completion."""
        if options.max_length is None:
            return
        tokens = [len(each.token_ids) for each in rollout.completions]
        for number, prompt in enumerate(rollout.prompts):
            first = number - number % 2
            room = max(options.max_length - max(tokens[first : first + 2]), 1)
            rollout.prompts[number] = prompt[-room:]

    def learn(self, rewarded: Rewarded, options: OnlineDPOOptions) -> Learned:
        total = weighted(rewarded.group.rewards, rewarded.group.weights)
        ended = rewarded.ended
        if options.missing_eos_penalty is not None:
            total = total - options.missing_eos_penalty * (~ended).to(total)
        magnitude = summed_up(rewarded.group.rewards, rewarded.group.weights)
        pairs = above_smallest(total.view(-1, 2), magnitude.view(-1, 2))
        better = pairs[:, 0] >= pairs[:, 1]
        signs = torch.stack([better, ~better], 1).float() * 2 - 1
        preference = signs.masked_fill(pairs.isnan().any(1, keepdim=True), 0).view(-1)
        own, reported = rewarded.own, rewarded.reported
        beta = torch.full((len(rewarded.rollout),), options.beta_of(rewarded.epoch), dtype=torch.float64)
        return Learned(
            (pairs - pairs.flip(1)).view(-1).nan_to_num(nan=0.0),
            {PREFERENCE: preference[own], REWARD: total[own].nan_to_num(nan=0.0).float(), BETA: beta},
            metrics={
                "objective/scores": total[:reported].nanmean().item(),
                "objective/scores_margin": pairs[: reported and reported // 2].diff().abs().nanmean().item(),
                "val/contain_eos_token": ended[:reported].float().mean().item(),
            },
        )

    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        signs = torch.tensor([1.0, -1.0]).repeat(completions // 2)
        return {PREFERENCE: signs, REWARD: torch.zeros(completions), BETA: torch.ones(completions)}, {}

    def batch(self, rollout: Rollout, rows: Sequence[int], *, sharing: bool) -> RaggedBatch:
        """Pairs as rows: a prompt, then the chosen and the rejected completion."""
        preference, beta, reward = (rollout.row_values[name] for name in (PREFERENCE, BETA, REWARD))
        pairs = [(2 * row, 2 * row + 1) if preference[2 * row] >= 0 else (2 * row + 1, 2 * row) for row in rows]
        places = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
        firsts = places[:, 0]
        lengths = [[len(rollout.completions[number].token_ids) for number in pair] for pair in pairs]
        return rollout.rows_of(
            pairs,
            sharing=sharing,
            row_values={
                LENGTHS: torch.tensor(lengths).view(-1, 2),
                DECIDED: preference[firsts] != 0,
                BETA: beta[firsts],
                REWARD: reward[places],
            },
        )


@dataclass(frozen=True)
class WrittenPairs:
    """What is known of pairs that the policy wrote. Log-probabilities in nats, summed over a completion's tokens."""

    pairs: Pairs
    """Sums as the loss takes them."""
    decided: Float[Tensor, " pairs"]
    """1 where one completion is known to be the better, 0 where nothing is learned."""
    divergence: Float[Tensor, "2 pairs"]
    """Of chosen and rejected: how much likelier than to the reference, without gradient."""
    logprobs: Float[Tensor, "2 pairs"]
    """Without gradient."""
    reward: Float[Tensor, "2 pairs"]
    learned: Bool[Tensor, "2 pairs"]
    """Whether there are tokens to learn from: a completion that was cut off may have been left out."""
    beta: Float[Tensor, " pairs"]


@dataclass
class PairSettings:
    """The options that the losses of pairs read."""

    beta: Any
    """[pairs]"""
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5


def read_written_pairs(
    batch: RaggedBatch,
    stats: Stats,
    reference: Float[Tensor, " scores"] | None,
    *,
    ld_alpha: float | None = None,
) -> WrittenPairs:
    """Sums over the two completions of each row.

    Args:
        ld_alpha: weight of a completion's tokens beyond the length of the other (LD-DPO, arXiv 2409.06411).
    """
    assert reference is not None, "online DPO compares with a reference"
    read = read_pairs(batch, stats, reference, ld_alpha=ld_alpha)
    one = torch.ones_like(read.chosen_tokens)  # IPO compares sums here, as TRL does, and no means over tokens
    pairs = Pairs(read.chosen, read.rejected, read.ref_chosen, read.ref_rejected, one, one)
    logprobs = completion_sums(stats["logprobs"].detach(), batch).T
    divergence = logprobs - completion_sums(reference, batch).T
    tokens = completion_sums(torch.ones_like(reference), batch).T
    beta = batch.row_values[BETA].to(logprobs.dtype)
    return WrittenPairs(
        pairs,
        batch.row_values[DECIDED].to(logprobs.dtype),
        divergence,
        logprobs,
        batch.row_values[REWARD].to(logprobs.dtype).T,
        tokens > 0,
        beta,
    )


def decided_counts(batch: RaggedBatch) -> Counts:
    """The pairs of a batch of which one completion is known to be the better."""
    return {"pairs": int(batch.row_values[DECIDED].sum())}


def loss(written: WrittenPairs, counts: Counts, *, options: OnlineDPOOptions) -> Outcome:
    """The mean loss of the pairs that are decided, in the whole batch."""
    pairs, beta, decided, learned = written.pairs, written.beta, written.decided, written.learned
    losses = LOSSES[options.loss_type].fn(pairs, PairSettings(beta)) * decided

    def of_decided(values: Tensor, taken: Tensor) -> Mean:
        counted = decided * taken
        return Mean(to_float64((values.detach() * counted).sum()), to_float64(counted.sum()))

    both = learned.all(0)

    chosen, rejected = (beta * ratio.detach() for ratio in (pairs.chosen_ratio, pairs.rejected_ratio))
    less = -beta * written.divergence
    means = {
        "rewards/chosen": of_decided(chosen, learned[0]),
        "rewards/rejected": of_decided(rejected, learned[1]),
        "rewards/accuracies": of_decided((chosen > rejected).to(chosen.dtype), both),
        "rewards/margins": of_decided(chosen - rejected, both),
        "logps/chosen": of_decided(pairs.chosen, learned[0]),
        "logps/rejected": of_decided(pairs.rejected, learned[1]),
        "objective/kl": mean_of(written.divergence, learned),
        "objective/non_score_reward": mean_of(less, learned),
        "objective/rlhf_reward": mean_of(written.reward + less, learned),
        "objective/entropy": mean_of(-written.logprobs, learned),
        "beta": mean_of(beta),
    }
    return Outcome(losses.sum() / max(counts["pairs"], 1), means)


def objective(options: OnlineDPOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over pairs."""
    return RowObjective(
        read=partial(read_written_pairs, ld_alpha=options.ld_alpha),
        loss=partial(loss, options=options),
        counts=decided_counts,
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        temperature=options.scored_at,
        needs_reference=True,
    )


ARGUMENTS = (
    *("model", "ref_model", "reward_funcs", "args", "data_collator", "train_dataset", "eval_dataset"),
    *("processing_class", "reward_processing_classes", "peft_config", "compute_metrics", "callbacks", "optimizers"),
    *("judge", "quantization_config", "tools", "rollout_func", "environment_factory", "optimizer_cls_and_kwargs"),
)
PAPER = Paper(
    "guo2024direct",
    "Direct Language Model Alignment from Online AI Feedback",
    ("Shangmin Guo", "Biao Zhang", "Tianlin Liu", "Tianqi Liu", "Misha Khalman", "others"),
    2024,
    "2402.04792",
)
METHOD = Method(
    "online-dpo",
    "online direct preference optimization",
    OnlineDPOOptions,
    Prompts(Preferred(), with_images=True),
    objective,
    PAPER,
    arguments=ARGUMENTS,
)
