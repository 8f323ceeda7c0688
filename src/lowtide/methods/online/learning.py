"""What a method makes of a rewarded rollout: the values and the batches that its update learns from.

This is the one thing that differs between the methods whose policy writes; `methods.online.rollouts.Prompts` holds it.
The maker of rollouts calls `learn` once all ranks have rewarded theirs, the trainer takes batches of the result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.data.batches.values import TOKEN_ADVANTAGE, WINDOW_TOKENS
from lowtide.engine.heads.head import Head
from lowtide.objectives.advantages import Advantages
from lowtide.objectives.step_rewards import StepRewards, to_go
from lowtide.ops.float64 import exchange_device, float64_device
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import gathered, objects_of_all_ranks
from lowtide.rollout.rollout import Rollout

Values = dict[str, Tensor]
"""Row values or score values, by name."""


@dataclass(frozen=True)
class GroupRewards:
    """The rewards of all completions of all ranks that were written at a time; those of a prompt stand together."""

    rewards: Float[Tensor, "completions functions"]
    weights: Float[Tensor, " functions"]
    size: int
    """Completions of a prompt."""
    divergence: Float[Tensor, " completions"] | None = None
    """How much likelier each completion is to the policy that wrote it than to the reference, in nats."""
    steps: StepRewards = field(default_factory=StepRewards.of)
    """Rewards at several places of completions, whose sums are among `rewards`."""

    @property
    def outcomes(self) -> Float[Tensor, "completions functions"]:
        """The rewards of functions that judge completions as a whole; NaN of those that judge steps."""
        if not len(self.steps):
            return self.rewards
        return self.rewards.index_fill(1, self.steps.function.unique(), torch.nan)


def reported_of(reported: int | None, own: slice) -> int:
    """How many of some completions among those of all ranks metrics are of (see `Rewarded.reported`)."""
    last = own.stop if reported is None else min(reported, own.stop)
    return max(last - own.start, 0)


@dataclass(frozen=True)
class Rewarded:
    """A rollout of this rank with the rewards of all ranks."""

    rollout: Rollout
    group: GroupRewards
    own: slice
    """The completions of this rank among those of all."""
    device: torch.device
    """Where ranks exchange tensors."""
    epoch: float = 0.0
    """Passes over the prompts that were completed before."""
    evaluated: bool = False
    """Whether the completions are evaluated, all at once, and not learned from."""
    copies: int = 1
    """Neighbouring ranks that hold the same rollout; it counts once."""
    reported: int | None = None
    """Completions of all ranks that metrics are of: those behind them fill up the last batch of an evaluation. None:
    all of them."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The row that each completion of this rank was written for."""

    @property
    def own_reported(self) -> int:
        """Completions of this rank that metrics are of."""
        return reported_of(self.reported, self.own)

    def of_all_ranks(self, values: Tensor) -> Tensor:
        """Values of all ranks, one after the other, on the CPU; all ranks have as many."""
        return gathered(values.to(exchange_device(values, self.device)), self.copies).cpu()

    def texts(self, wanted: Collection[int], tokenizer: Any) -> dict[int, str]:
        """What completions of all ranks say, by their numbers; all ranks ask for the same ones."""
        first, written = self.own.start, self.rollout.completions
        own = {
            number: tokenizer.decode(written[number - first].token_ids, skip_special_tokens=True)
            for number in wanted
            if first <= number < self.own.stop
        }
        return {number: text for each in objects_of_all_ranks(own, self.copies) for number, text in each.items()}

    def summed(self, *values: Tensor | float) -> list[float]:
        """Sums over all ranks."""
        device = float64_device(self.device)
        mine = torch.tensor([[float(each) for each in values]], dtype=torch.float64, device=device)
        return gathered(mine, self.copies).sum(0).tolist()

    def smallest(self, values: Tensor) -> float:
        """The smallest value of all ranks; 0 where there is none."""
        mine = torch.tensor([values.min().item() if len(values) else math.inf], dtype=torch.float64)
        found = self.of_all_ranks(mine).min().item()
        return found if math.isfinite(found) else 0.0

    @property
    def own_steps(self) -> StepRewards:
        """Rewards at several places of the completions of this rank."""
        return self.group.steps.of_completions(self.own)

    @property
    def ended(self) -> Bool[Tensor, " completions"]:
        """Of all ranks: whether a completion ended by itself, and was not cut off."""
        return self.of_all_ranks(torch.tensor([each.finish == "stop" for each in self.rollout.completions]))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion of this rank that are learned from."""
        return [sum(flags) for flags in self.rollout.scored]


@dataclass(frozen=True)
class Learned:
    """What a method knows of a rollout when it is made."""

    values: Float[Tensor, " completions"]
    """Of all ranks: how good each completion is, for the table of completions."""
    row_values: Values = field(default_factory=dict)
    """[completions] each, of this rank."""
    score_values: Values = field(default_factory=dict)
    """[scores] each, of this rank."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Over all ranks, under TRL's names."""


@dataclass(frozen=True)
class Survey:
    """What is written of every prompt before training, by the policy as it arrives, and what becomes of its rewards."""

    completions: int
    """Of each prompt."""
    column: str
    """That rows get; those that have it are not surveyed."""
    value: Callable[[Float[Tensor, "prompts completions"]], Float[Tensor, " prompts"]]
    """From rewards, NaN where nothing rewards a completion, to what the column holds."""
    left_out: Callable[[Float[Tensor, "prompts completions"]], Bool[Tensor, " prompts"]] | None = None
    """Which prompts are not trained on; None: none."""


class Learning(ABC):
    """From a rewarded rollout to the batches of its update. It holds no state: what is carried from a rollout to its
    last update stands in the rollout, and is saved with it."""

    completions: ClassVar[int] = 1
    """Completions in a row of a batch."""
    reads: ClassVar[type[Head] | None] = None
    """A head that is read at each written token before the update; its numbers are the score value `VALUE`."""

    def wants_old(self, options: Any, *, stale: bool) -> bool:
        """Whether the log-probabilities of the policy that wrote are needed, as the score value `OLD`.

        Args:
            stale: the weights change before all of a rollout is learned from.
        """
        return stale

    def survey(self, options: Any) -> Survey | None:
        """What is written of every prompt before training; None: nothing."""
        return None

    def prepare(self, rollout: Rollout, options: Any) -> None:  # noqa: B027
        """Changes a rollout that was rewarded before it is scored; by default not at all."""

    def teacher_prompts(self, rewarded: Rewarded, options: Any, tokenizer: Any) -> Callable[[], list[list[int]]] | None:
        """What a teacher reads before each completion of this rank, where that depends on rewards: a function without
        arguments that makes it, by itself on each rank; None where it does not. All ranks call this, before `learn`."""
        return None

    def degenerate(self, metrics: Mapping[str, float], options: Any) -> dict[str, str]:
        """By a name of each, why nothing is to be learned from a window with such metrics; by default nothing is said.
        Options of a method that says so have `diagnostics_warning_interval`."""
        return {}

    @abstractmethod
    def learn(self, rewarded: Rewarded, options: Any) -> Learned:
        """What is learned from the completions of all ranks; called by all ranks together."""

    @abstractmethod
    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        """Row values and score values as `learn` gives them, for completions that nobody rewarded: what a step is
        rehearsed and planned on."""

    def order(self, rows: int, *key: int) -> Sequence[int]:
        """In which order the rows of a rollout are learned from.

        Args:
            key: the place of the rollout, and how often it was learned from before.
        """
        return range(rows)

    def batch(self, rollout: Rollout, rows: Sequence[int], *, sharing: bool) -> RaggedBatch:
        """Some rows of a rollout as a batch.

        Args:
            rows: their numbers; a row is `completions` completions that stand together.
            sharing: a prompt is computed once.
        """
        return rollout.batch(rows, sharing=sharing)

    def taught(self, rollout: Rollout, rows: Sequence[int], *, sharing: bool) -> RaggedBatch | None:
        """The same as a teacher with prompts of its own reads it, score by score; None where it reads the student's."""
        return None if rollout.teacher_prompts is None else self.batch(rollout.taught, rows, sharing=sharing)


class ByAdvantage(Learning):
    """Each completion is weighed by how much better it is than others; `options.advantages` says by how much."""

    def group_of(self, rewarded: Rewarded, options: Any) -> GroupRewards:
        """What advantages are computed of."""
        return rewarded.group

    def learn(self, rewarded: Rewarded, options: Any) -> Learned:
        found: Advantages = options.advantages(self.group_of(rewarded, options))
        whole, of_tokens = token_advantages(found, rewarded)
        share = 0.0 if rewarded.evaluated else options.gradient_accumulation_steps / options.steps_of_generation
        (scores,) = rewarded.summed(sum(rewarded.lengths))
        window = torch.full((len(rewarded.rollout),), scores * share)
        groups = None if rewarded.reported is None else rewarded.reported // rewarded.group.size
        return Learned(
            whole,
            {WINDOW_TOKENS: window},
            {TOKEN_ADVANTAGE: of_tokens.float()},
            metrics={"frac_reward_zero_std": found.without_spread[:groups].float().mean().item()},
        )

    def blank(self, completions: int, scores: int) -> tuple[Values, Values]:
        return {WINDOW_TOKENS: torch.ones(completions)}, {TOKEN_ADVANTAGE: torch.ones(scores)}


def token_advantages(
    found: Advantages, rewarded: Rewarded
) -> tuple[Float[Tensor, " completions"], Float[Tensor, " scores"]]:
    """(the advantage of each completion of all ranks as a whole, which is that of its first token; those of the tokens
    of this rank's that are learned from)."""
    of_tokens = found.values[rewarded.own].repeat_interleave(torch.tensor(rewarded.lengths, dtype=torch.long))
    if found.steps is None:
        return found.values, of_tokens
    steps, own = rewarded.group.steps, rewarded.own
    mine = (steps.completion >= own.start) & (steps.completion < own.stop)
    ends = rewarded.own_steps.at_scores(found.steps[mine], rewarded.rollout.scored)
    return found.values.index_add(0, steps.completion, found.steps), of_tokens + to_go(ends, rewarded.lengths)
