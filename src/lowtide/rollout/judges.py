"""Judges of pairs: which of two completions of a prompt is better, under the names of TRL's judges.

A judge has a method `judge(prompts, completions, shuffle_order=True)`, sync or async, that gives for each prompt the
number of the better completion, 0 or 1, or -1 where it cannot tell. TRL 1.16 has none any more. This is the interface
of its earlier versions, and judges that were written for it can be passed as they are.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from lowtide.objectives.advantages import above_smallest, summed_up, weighted
from lowtide.objectives.step_rewards import StepRewards
from lowtide.rollout.calls import Caller, CallTimedOut, name_of
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.rewards import Rewards
from lowtide.rollout.rewards.scored import Scored, Scorer

FIRST, SECOND, UNDECIDED = 0, 1, -1
CHOICES = (FIRST, SECOND, UNDECIDED)
LINE = 300
"""Characters of an error that a message repeats."""


class BasePairwiseJudge(ABC):
    """A judge of pairs."""

    @abstractmethod
    def judge(
        self, prompts: Sequence[Any], completions: Sequence[Sequence[Any]], shuffle_order: bool = True
    ) -> list[int]:
        """For each prompt the number of the better completion, 0 or 1, or -1 where that cannot be told.

        Args:
            prompts: texts, or conversations.
            completions: two for each prompt.
            shuffle_order: show the two in random order, for a judge that prefers a place.
        """


class RandomPairwiseJudge(BasePairwiseJudge):
    """Draws: for trying things out.

    Args:
        seed: of its own random numbers; None for another one each time.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def judge(
        self, prompts: Sequence[Any], completions: Sequence[Sequence[Any]], shuffle_order: bool = True
    ) -> list[int]:
        return [self._random.randint(FIRST, SECOND) for _ in prompts]


class RewardJudge(BasePairwiseJudge):
    """Prefers the completion with the larger reward; of two that are equal, or that no reward applies to, none.

    Args:
        rewards: `Rewards`, or what they are made of: reward functions, models, or their names. Functions get prompts
            and completions, but neither tokens nor columns of the dataset.
        more: the arguments of `Rewards`, where these are made here.
    """

    def __init__(self, rewards: Any, **more: Any) -> None:
        self.rewards = rewards if isinstance(rewards, Rewards) else Rewards(rewards, **more)

    def judge(
        self, prompts: Sequence[Any], completions: Sequence[Sequence[Any]], shuffle_order: bool = True
    ) -> list[int]:
        """As of every judge; it looks at each completion alone, so that there is no order to shuffle."""
        repeated = [prompt for prompt, pair in zip(prompts, completions, strict=True) for _ in pair]
        what = Completed(repeated, [each for pair in completions for each in pair])
        rewards, weights = self.rewards(what), self.rewards.weights
        sums, magnitude = weighted(rewards, weights).view(-1, 2), summed_up(rewards, weights).view(-1, 2)
        return [self._better(*pair) for pair in above_smallest(sums, magnitude).tolist()]

    def _better(self, first: float, second: float) -> int:
        return FIRST if first > second else SECOND if second > first else UNDECIDED


class JudgedPairs(Scorer):
    """A judge in the place of `Rewards`: of two completions that stand together the better one gets 1, the other 0, and
    both NaN where the judge cannot tell.

    Args:
        judge: see `judge_pairs`.
        timeout: seconds that it may take; None for no limit.
    """

    def __init__(self, judge: Any, timeout: float | None = None) -> None:
        self.judge, self.caller = judge, Caller(timeout)
        self.names = [name_of(judge)]
        self.weights = torch.ones(1, dtype=torch.float64)

    def scored(self, completed: Completed, **more: Any) -> Scored:
        """As of `Rewards`; the completions of a prompt stand together, two of each."""
        said = list(completed.completions)
        pairs = list(zip(said[::2], said[1::2], strict=True))
        choices = torch.tensor(judge_pairs(self.judge, completed.prompts[::2], pairs, self.caller))
        better = torch.stack([choices == FIRST, choices == SECOND], 1).double()
        return Scored(better.masked_fill((choices == UNDECIDED)[:, None], torch.nan).view(-1, 1), StepRewards.of())


def judge_pairs(
    judge: Any, prompts: Sequence[Any], pairs: Sequence[Sequence[Any]], caller: Caller | None = None
) -> list[int]:
    """What a judge says of some pairs, checked.

    Args:
        judge: with a method `judge`, or a function with its arguments; sync or async.
        prompts: texts, or conversations.
        pairs: two completions for each prompt.
        caller: gives it its time.

    Raises:
        ValueError: it raised, took too long, or did not give 0, 1 or -1 for each prompt; names it and the prompt.
    """
    function = getattr(judge, "judge", judge)
    name = name_of(judge)
    if not callable(function):
        raise ValueError(f"judge is a {type(judge).__name__}, which has no method judge(prompts, completions)")
    caller = caller or Caller()
    try:
        choices = caller.call(function, prompts=list(prompts), completions=[list(pair) for pair in pairs])
    except CallTimedOut:
        raise ValueError(
            f"judge {name!r} gave nothing within {caller.timeout:g} seconds, for {len(prompts)} prompts. Give what it "
            "waits for a time limit of its own, and return -1 where it cannot tell"
        ) from None
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:LINE]
        raise ValueError(f"judge {name!r} raised {text}. It may return -1 for a pair that it cannot tell") from error
    if isinstance(choices, str) or not hasattr(choices, "__len__") or len(choices) != len(prompts):
        found = f"{len(choices)} choices" if hasattr(choices, "__len__") else f"a {type(choices).__name__}"
        raise ValueError(
            f"judge {name!r} returned {found} for {len(prompts)} prompts: it must return 0, 1 or -1 for each"
        )
    where = Completed(prompts, pairs)
    return [_choice(each, name, where, number) for number, each in enumerate(choices)]


def _choice(value: Any, name: str, where: Completed, number: int) -> int:
    if value not in CHOICES:
        raise ValueError(
            f"judge {name!r} returned {value!r} for {where.where(number)}: it must be 0 or 1, the number of the better "
            "completion, or -1"
        )
    return int(value)
