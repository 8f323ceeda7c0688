"""REINFORCE with a leave-one-out baseline (arXiv 2402.14740): whole completions as single actions.

The divergence from the reference is a part of the reward, as in the paper and in TRL.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.data.batches.values import OLD, REFERENCE
from lowtide.methods.method import Method, RowObjective
from lowtide.methods.online.clipped import ClippedOptions
from lowtide.methods.online.learning import ByAdvantage, GroupRewards, Learned, Rewarded
from lowtide.methods.online.policy import completion_counts, read_written
from lowtide.methods.online.rollouts import Prompts, ReferredOptions
from lowtide.methods.shared.options import VisionOptions
from lowtide.methods.shared.paper import Paper
from lowtide.objectives.advantages import Advantages, leave_one_out, summed_up, weighted
from lowtide.objectives.outcome import Counts, Outcome, mean_of
from lowtide.objectives.policy_gradient import Written
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import COUNT, NOT_NEGATIVE, option


@dataclass(kw_only=True)
class RLOOOptions(ReferredOptions, VisionOptions, ClippedOptions):
    """The options of REINFORCE leave-one-out, under TRL's names and with its defaults."""

    num_generations: int = option(2, "Completions of a prompt.", COUNT)
    beta: float = option(
        0.05, "Weight of the divergence from the reference in the reward; 0 goes without one.", NOT_NEGATIVE
    )
    normalize_advantages: bool = option(False, "Bring the advantages of a batch to a mean of 0 and a deviation of 1.")
    reward_clip_range: list[float] | None = option(None, "The least and the most of a reward.")
    vllm_importance_sampling_correction: bool = option(False, "Not in RLOO: ratios are of what the policy itself says.")

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_rollouts()
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations} leaves no other completion to be a baseline: at least 2"
            )
        bounds = self.reward_clip_range
        if bounds is not None and (len(bounds) != 2 or bounds[0] > bounds[1]):
            raise ValueError(f"reward_clip_range={bounds!r} must be (least, most)")
        if self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction=True is GRPO's: RLOO's ratios are of what the policy itself says. "
                "Leave it out"
            )
        if self.sync_ref_model and not self.compares:
            raise ValueError("sync_ref_model=True moves a reference, and beta=0 has none: set beta above 0")

    def advantages(self, group: GroupRewards) -> Advantages:
        """By how much each completion is better than the mean of the others of its prompt."""
        total, magnitude = weighted(group.rewards, group.weights), summed_up(group.rewards, group.weights)
        if self.reward_clip_range is not None:
            clipped = total.clamp(*self.reward_clip_range)
            total, magnitude = clipped, magnitude.where(clipped == total, 0.0)  # a bound is not rounded
        if group.divergence is not None:
            total = total - self.beta * group.divergence
        return leave_one_out(total, group.size, magnitude=magnitude, normalize=self.normalize_advantages)


class LessDivergence(ByAdvantage):
    """Rewards count how far a completion is from the reference."""

    def wants_old(self, options: RLOOOptions, *, stale: bool) -> bool:
        return stale or options.compares

    def group_of(self, rewarded: Rewarded, options: RLOOOptions) -> GroupRewards:
        if not options.compares:
            return rewarded.group
        return replace(rewarded.group, divergence=rewarded.of_all_ranks(_divergence(rewarded)))

    def learn(self, rewarded: Rewarded, options: RLOOOptions) -> Learned:
        found = super().learn(rewarded, options)
        if options.compares:
            own = rewarded.own_reported
            total, tokens = rewarded.summed(_divergence(rewarded)[:own].sum(), sum(rewarded.lengths[:own]))
            found.metrics["kl"] = total / max(tokens, 1)
        return found


def _divergence(rewarded: Rewarded) -> Float[Tensor, " completions"]:
    """How much likelier each completion of this rank is to the policy that wrote it than to the reference, in nats."""
    values = rewarded.rollout.score_values
    tokens = values[OLD].double() - values[REFERENCE].double()
    return torch.stack([part.sum() for part in tokens.split(rewarded.lengths)])


def loss(written: Written, counts: Counts, *, options: RLOOOptions) -> Outcome:
    """The clipped surrogate of whole completions, whose ratio is that of all their tokens together."""
    ratio = torch.exp(written.sums(written.log_ratios))
    advantage = written.means(written.advantages)
    within = ratio.clamp(1 - options.epsilon, 1 + options.upper)
    losses = -torch.minimum(ratio * advantage, within * advantage)
    low, high = (ratio < 1 - options.epsilon) & (advantage < 0), (ratio > 1 + options.upper) & (advantage > 0)
    total = losses.sum() / counts["completions"]
    learned = written.lengths > 0
    low, high = low.float(), high.float()
    means = {
        "clip_ratio/low_mean": mean_of(low, learned),
        "clip_ratio/high_mean": mean_of(high, learned),
        "clip_ratio/region_mean": mean_of(low + high, learned),
    }
    lows = {"clip_ratio/low_min": low.masked_fill(~learned, math.inf).min()}
    highs = {"clip_ratio/high_max": high.masked_fill(~learned, -math.inf).max()}
    return Outcome(total, means, lows, highs)


def objective(options: RLOOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over completions."""
    return RowObjective(
        read=read_written,
        loss=functools.partial(loss, options=options),
        counts=completion_counts,
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        temperature=options.temperature,
    )


PAPER = Paper(
    "ahmadian2024back",
    "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    ("Arash Ahmadian", "Chris Cremer", "Matthias Gallé", "Marzieh Fadaee", "Julia Kreutzer", "others"),
    2024,
    "2402.14740",
)
ROWS = Prompts(LessDivergence(), with_images=True)
METHOD = Method("rloo", "REINFORCE leave-one-out", RLOOOptions, ROWS, objective, PAPER)
