"""What rewards completions, whatever it is: the names and weights of its columns, and rewards with those of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from lowtide.objectives.step_rewards import StepRewards
from lowtide.rollout.rewards.completed import Completed


class Scored(NamedTuple):
    """The rewards of completions."""

    rewards: Float[Tensor, "completions functions"]
    """Float64 on the CPU; NaN where a function does not apply, and sums where it rewards steps."""
    steps: StepRewards
    """Of the functions that reward steps."""


class Scorer(ABC):
    """What rewards completions."""

    names: Sequence[str]
    """Of each column, no two alike."""
    weights: Float[Tensor, " functions"]
    """Of each column in a completion's reward."""

    @abstractmethod
    def scored(self, completed: Completed, **more: Any) -> Scored:
        """The rewards, and those of steps.

        Args:
            more: what functions get beside completions.
        """

    def __call__(self, completed: Completed, **more: Any) -> Float[Tensor, "completions functions"]:
        """The rewards alone, as `scored`."""
        return self.scored(completed, **more).rewards
