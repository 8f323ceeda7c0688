"""Options of methods that clip ratios, and that compare the rewards of a prompt's completions with one another."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.methods.online.learning import GroupRewards
from lowtide.objectives.advantages import Advantages, relative_to_group
from lowtide.objectives.step_rewards import relative_steps, with_steps
from lowtide.option import NOT_NEGATIVE, option

SCALES = ("group", "batch", "none")
SPELLED = {"True": "group", "False": "none", "true": "group", "false": "none"}
"""How older scripts say how rewards are scaled."""


@dataclass(kw_only=True)
class ClippedOptions:
    """Of methods whose ratios are clipped."""

    epsilon: float = option(
        0.2, "How far a ratio may fall below 1, or rise above it, before it is clipped.", NOT_NEGATIVE
    )
    epsilon_high: float | None = option(None, "How far it may rise. None: `epsilon`.", NOT_NEGATIVE)

    @property
    def upper(self) -> float:
        """How far a ratio may rise."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(kw_only=True)
class ComparedOptions(ClippedOptions):
    """Of those among them whose advantages are relative to a group."""

    scale_rewards: str = option("group", "Divide by the deviation of the group, of the batch, or not at all.")

    def respell(self) -> None:
        """True and False for how rewards are scaled, as older scripts have them."""
        self.scale_rewards = SPELLED.get(str(self.scale_rewards), str(self.scale_rewards))

    def check_scale(self) -> None:
        """Refuses another way to scale rewards than there is.

        Raises:
            ValueError: naming it.
        """
        if self.scale_rewards not in SCALES:
            raise ValueError(f"scale_rewards={self.scale_rewards!r} is not one of {', '.join(SCALES)}, True, False")

    @property
    def aggregation(self) -> str:
        """Whether the rewards of several functions are added up before they are normalized, or after."""
        return "sum_then_normalize"

    def advantages(self, group: GroupRewards) -> Advantages:
        """By how much each completion is better than the others of its prompt, and each of its steps where functions
        reward these."""
        scale, groups = self.scale_rewards, len(group.rewards) // group.size
        found = relative_to_group(group.outcomes, group.weights, group.size, scale=scale, aggregation=self.aggregation)
        if not len(group.steps):
            return found
        of_steps = relative_steps(group.steps, group.weights, group.size, groups, scale=scale)
        return with_steps(found, group.steps, of_steps)
