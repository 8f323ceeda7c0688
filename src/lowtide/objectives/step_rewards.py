"""Rewards at several places of a completion, such as at the end of each step, and the advantages of tokens.

Process supervision as in DeepSeekMath (arXiv 2402.03300, section 4.1.3): the rewards of all steps of a prompt's
completions are normalized together, and the advantage of a token is the sum of those of the steps that end at it or
later. All of it is in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowtide.objectives.advantages import TINY, Advantages, above_smallest, deviation


@dataclass(frozen=True)
class StepRewards:
    """Rewards at tokens of completions, one entry for each in every tensor."""

    completion: Int[Tensor, " steps"]
    """The number of the completion; entries are in the order of completions."""
    place: Int[Tensor, " steps"]
    """The token that ends the step, from 0 among all tokens of the completion; -1 for its last one."""
    function: Int[Tensor, " steps"]
    """The column of rewards that it is of."""
    value: Float[Tensor, " steps"]

    @classmethod
    def of(cls, entries: Sequence[tuple[int, int, int, float]] = ()) -> StepRewards:
        """Of (completion, place, function, value) each; by default none at all."""
        completion, place, function = (torch.tensor([each[n] for each in entries], dtype=torch.long) for n in range(3))
        value = torch.tensor([each[3] for each in entries], dtype=torch.float64)
        return cls(completion, place, function, value).in_order()

    @classmethod
    def concat(cls, parts: Sequence[StepRewards], counts: Sequence[int]) -> StepRewards:
        """One after the other.

        Args:
            counts: completions of each part.
        """
        starts = [sum(counts[:number]) for number in range(len(parts))]
        moved = [replace(each, completion=each.completion + start) for each, start in zip(parts, starts, strict=True)]
        return cls(*(torch.cat([getattr(each, one.name) for each in moved]) for one in fields(cls)))

    def __len__(self) -> int:
        return len(self.value)

    def in_order(self) -> StepRewards:
        """In the order of completions."""
        return self._chosen(torch.argsort(self.completion, stable=True))

    def _chosen(self, which: Tensor) -> StepRewards:
        return StepRewards(self.completion[which], self.place[which], self.function[which], self.value[which])

    def of_completions(self, own: slice) -> StepRewards:
        """Those of some completions that stand together, the first of which is 0."""
        found = self._chosen((self.completion >= own.start) & (self.completion < own.stop))
        return replace(found, completion=found.completion - own.start)

    def chosen(self, numbers: Sequence[int]) -> StepRewards:
        """Those of some completions, in their order; of one that is there several times, as often."""
        parts = [self.of_completions(slice(number, number + 1)) for number in numbers]
        return StepRewards.concat([StepRewards.of(), *parts], [0] + [1] * len(parts))

    def replaced(self, places: Sequence[int], other: StepRewards) -> StepRewards:
        """With those of other completions in some places."""
        at = torch.tensor(list(places), dtype=torch.long)
        left = self._chosen(~torch.isin(self.completion, at))
        both = StepRewards.concat([left, replace(other, completion=at[other.completion])], [0, 0])
        return both.in_order()

    def with_wholes(self, rewards: Float[Tensor, "completions functions"]) -> StepRewards:
        """With the rewards that functions of steps gave to completions as a whole, at their last token.

        Args:
            rewards: of all functions, the sums of steps among them; NaN where there is none.
        """
        known = ~rewards.isnan()
        known[:, [n for n in range(rewards.shape[1]) if not (self.function == n).any()]] = False
        known[self.completion, self.function] = False
        completion, function = known.nonzero(as_tuple=True)
        wholes = StepRewards(
            completion, torch.full_like(completion, -1), function, rewards[completion, function].double()
        )
        both = StepRewards.concat([self, wholes], [0, 0])
        return both.in_order()

    def at_scores(self, values: Float[Tensor, " steps"], scored: Sequence[Sequence[bool]]) -> Float[Tensor, " scores"]:
        """Numbers of the steps, added up at the last token that is scored and does not stand behind the step's end, in
        float64; one before which nothing is scored is left out.

        Args:
            scored: of each token of each completion, whether it is scored.
        """
        starts = torch.tensor([0, *map(len, scored)], dtype=torch.long).cumsum(0)
        before = torch.tensor([0, *(flag for flags in scored for flag in flags)], dtype=torch.long).cumsum(0)
        first, stop = starts[self.completion], starts[self.completion + 1]
        at = before[torch.where(self.place < 0, stop, first + self.place + 1)] - 1
        there = at >= before[first]
        found = torch.zeros(int(before[-1]), dtype=torch.float64)
        return found.index_add(0, at[there], values.double()[there])


def to_go(values: Float[Tensor, " scores"], lengths: Sequence[int]) -> Float[Tensor, " scores"]:
    """The sum of each value and those behind it in its completion.

    Args:
        lengths: of each completion.
    """
    return torch.cat([values[:0], *(part.flip(0).cumsum(0).flip(0) for part in values.split(list(lengths)))])


def relative_steps(
    steps: StepRewards, weights: Float[Tensor, " functions"], size: int, groups: int, *, scale: str = "group"
) -> Float[Tensor, " steps"]:
    """Rewards of steps less the mean over all steps of the group, over their standard deviation, times the weight of
    the function; each function by itself.

    Args:
        size: completions of a group.
        groups: how many there are.
        scale: the deviation is that of the "group", of the whole "batch", or "none" divides.
    """
    found = torch.zeros(len(steps), dtype=torch.float64)
    for function in steps.function.unique().tolist():
        mine = steps.function == function
        counts = torch.bincount(steps.completion[mine] // size, minlength=groups)
        rows = pad_sequence(list(steps.value[mine].split(counts.tolist())), True, torch.nan)
        above = above_smallest(rows)
        values = above - above.nanmean(1, keepdim=True)
        if scale != "none":
            values = values / (deviation(rows if scale == "group" else rows.view(1, -1)) + TINY)
        found[mine] = values[~rows.isnan()] * weights[function].double()
    return found


def with_steps(found: Advantages, steps: StepRewards, values: Float[Tensor, " steps"]) -> Advantages:
    """Advantages of whole completions, and of their steps beside them.

    Args:
        values: of the steps, as `relative_steps` gives them.
    """
    group = steps.completion // (len(found.values) // len(found.without_spread))
    spread = torch.zeros_like(found.without_spread).index_fill(0, group[values != 0].unique(), True)
    return replace(found, without_spread=found.without_spread & ~spread, steps=values)
