"""Replay of groups whose rewards had spread: on prompts where the policy rarely succeeds, what was once learned from
takes the places of groups that teach nothing.

The option is TRL's `replay_buffer_size`, of the GRPO trainer with a replay buffer that its experimental folder had. So
is how groups are kept and drawn: the best by the sum of their advantages' sizes times the deviation of their rewards,
drawn in proportion to it, one several times if need be. It deviates in that a window is filled from earlier ones, not
from itself, and that all ranks share one buffer, so that a run does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.data.batches.values import OLD
from lowtide.objectives.advantages import TINY, deviation, weighted
from lowtide.ranks.world import objects_of_all_ranks
from lowtide.rollout.rollout import Rollout
from lowtide.run.rollouts import Made, RolloutMaker
from lowtide.run.writing import seed_of

REPLAYED = 3
"""What keys the random numbers here, beside the 0 of windows, the 1 of evaluations and the 2 of resampling."""


@dataclass
class Replay:
    """Keeps groups, and replaces those of a window that have no spread."""

    maker: RolloutMaker
    size: int
    """Groups that are kept at most."""
    kept: Made | None = None
    """Their completions, those of a group together; None before there are some."""
    scores: list[float] = field(default_factory=list)
    """Of each group, how much there was to learn from it."""
    _taken: list[int] = field(default_factory=list)
    """The groups of the window among all ranks' that were replaced."""

    def check(self) -> None:
        """Refuses what groups cannot be replaced beside.

        Raises:
            ValueError: ranks learn from the same rows.
        """
        if self.maker.together is not None:
            raise ValueError(
                f"replay_buffer_size={self.size} does not go with ranks that learn from the same rows: set it to 0, or "
                "leave the other out"
            )

    def filled(self, made: Made, window: Sequence[int]) -> Made:
        """A window in which kept groups take the places of those without spread.

        Args:
            made: what this rank wrote of its rows, rewarded.
            window: the pass over the rows, and the window in it.
        """
        options: Any = self.maker.options
        size, group = options.num_generations, self.maker.group_of(made, options.num_generations)
        without = options.advantages(group).without_spread.nonzero().flatten().tolist()
        self._taken = without if self.kept is not None else []
        if self.kept is not None and without:
            generator = torch.Generator().manual_seed(seed_of(options.seed, REPLAYED, *window))
            scores = torch.tensor(self.scores, dtype=torch.float64)
            drawn = torch.multinomial(scores, len(without), replacement=True, generator=generator).tolist()
            own = self.maker.own_of(len(made.rollout))
            pairs = [(g * size + n, k * size + n) for g, k in zip(without, drawn, strict=True) for n in range(size)]
            mine = [(place - own.start, kept) for place, kept in pairs if own.start <= place < own.stop]
            made = made.replaced([place for place, _ in mine], self.kept.chosen([kept for _, kept in mine]))
        made.metrics |= {
            "replay/replaced_groups": float(len(self._taken)),
            "replay/kept_groups": float(len(self.scores)),
        }
        return made

    def take_in(self, made: Made) -> None:
        """Keeps the groups of a window that was scored, where they had spread and are not themselves replayed."""
        options: Any = self.maker.options
        size, group = options.num_generations, self.maker.group_of(made, options.num_generations)
        found = options.advantages(group)
        fresh = [n for n in (~found.without_spread).nonzero().flatten().tolist() if n not in self._taken]
        own = self.maker.own_of(len(made.rollout))
        places = [n * size + k - own.start for n in fresh for k in range(size) if own.start <= n * size + k < own.stop]
        everyones = objects_of_all_ranks(with_old(made, places), self.maker.runner.models().copies)
        totals = weighted(group.rewards, group.weights).view(-1, size)
        sizes = made.advantages.double().abs().view(-1, size).sum(1) * deviation(totals).flatten()
        parts = [*([] if self.kept is None else [self.kept]), *(each for each in everyones if len(each.rollout))]
        if not parts:
            return
        scores = [*self.scores, *(max(sizes[n].item(), TINY) for n in fresh)]
        best = sorted(sorted(range(len(scores)), key=lambda n: (-scores[n], n))[: self.size])
        self.kept = Made.concat(parts).chosen([n * size + k for n in best for k in range(size)])
        self.scores = [scores[n] for n in best]

    def save(self, path: Path) -> None:
        """Writes what is kept, if there is something."""
        if self.kept is not None:
            self.kept.rollout.save(
                path,
                scores=self.scores,
                prompts=list(self.kept.prompts),
                completions=list(self.kept.completions),
                calls=self.kept.calls,
            )

    def load(self, path: Path) -> None:
        """Reads what `save` wrote."""
        if path.exists():
            rollout, more = Rollout.load(path)
            self.scores, calls = more.pop("scores"), more.pop("calls")
            self.kept = Made(rollout, **more, calls=calls and [(answered, failed) for answered, failed in calls])


def with_old(made: Made, places: Sequence[int]) -> Made:
    """Some completions of a window, with the log-probabilities of the policy that wrote them, as they were scored."""
    old: Float[Tensor, " scores"] = made.rollout.score_values[OLD]
    parts = old.split([sum(flags) for flags in made.rollout.scored])
    chosen = made.chosen(places)
    for number, place in enumerate(places):
        known, one = iter(parts[place].tolist()), chosen.rollout.completions[number]
        flags = made.rollout.scored[place]
        plain = [next(known) if flag else own for flag, own in zip(flags, one.plain_logprobs, strict=True)]
        chosen.rollout.completions[number] = replace(one, plain_logprobs=plain)
    return replace(chosen, extra={})
