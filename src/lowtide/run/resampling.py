"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts whose completions are all rewarded alike teach
nothing, and others take their places before a window is learned from.

DAPO takes the next prompts of its loader, so that a pass over the rows has as many steps as rewards allow. Here other
prompts are drawn of all rows, keyed by the window: steps, places and checkpoints are those of a run without it, and a
run that resumes draws the same. All that a round lacks is written in one call of the generator.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.engine.forward import parted_over
from lowtide.ranks.shards import is_sharded
from lowtide.rollout.images import PromptImages
from lowtide.run.rollouts import Made, RolloutMaker
from lowtide.run.writing import seed_of

logger = logging.getLogger(__name__)
PLACES = 2
"""What keys the random numbers here, beside the 0 of windows and the 1 of evaluations."""


@dataclass
class Resampling:
    """Replaces the groups of a window that have no spread."""

    maker: RolloutMaker
    rows: Sequence[Mapping[str, Any]]
    """All prepared rows, which prompts are drawn of."""
    rounds: int
    """How often at most."""
    _warned: bool = field(default=False, init=False)

    def check(self) -> None:
        """Refuses what prompts cannot be replaced beside.

        Raises:
            ValueError: names the argument or the option.
        """
        model = self.maker.runner.model
        others = {
            "a stream, of which no row can be drawn": not hasattr(self.rows, "__len__"),
            "weights that are cut over ranks, which write together": is_sharded(model)
            or parted_over(model) is not None
            or self.maker.runner.together,
            "ranks that learn from the same rows": self.maker.together is not None,
        }
        for what, there in others.items():
            if there:
                raise ValueError(
                    f"dynamic_sampling_rounds={self.rounds} does not go with {what}: set it to 0, or leave the other "
                    "out"
                )

    def filled(
        self, made: Made, rows: Sequence[Mapping[str, Any]], window: Sequence[int], *, version: int, state: Any
    ) -> tuple[Made, list[Mapping[str, Any]]]:
        """A window in which groups without spread are replaced, as often as they are without it and rounds are left;
        then they stay as they are. And the rows that it is of.

        Args:
            made: what this rank wrote of its rows, rewarded.
            window: the pass over the rows, and the window in it.
            version: optimizer steps that the weights have taken.
            state: of the trainer, for reward functions.
        """
        maker, rows, prompts = self.maker, list(rows), self._drawn(window)
        options: Any = maker.options
        size, own = options.num_generations, maker.own_of(len(rows))
        flat = before = self._without_spread(made, size)
        lacked, done = 0, 0
        while flat and done < self.rounds:
            places = [place for group in flat for place in range(group * size, (group + 1) * size)]
            mine = [place - own.start for place in places if own.start <= place < own.stop]
            taken = [prompt for prompt in itertools.islice(prompts, len(flat)) for _ in range(size)]
            first = sum(place < own.start for place in places)
            new = [self.rows[row] for row in taken[first : first + len(mine)]]
            at = (PLACES, *window, done, first)
            found = maker.met(lambda: maker.rewarded(new, at, version, state) if new else None)  # noqa: B023
            if found is not None:
                for place, row in zip(mine, new, strict=True):
                    rows[place] = row
                made = made.replaced(mine, found)
                made.rollout.images = None if maker.reader is None else PromptImages.of_rows(maker.reader, rows)
            lacked, done = lacked + len(flat), done + 1
            flat = self._without_spread(made, size)
        if flat and not self._warned:
            self._warned = True
            logger.warning(
                f"after dynamic_sampling_rounds={self.rounds} rounds the completions of {len(flat)} prompts of a "
                "window are still rewarded alike: they stay in it, and nothing is learned of them (said once; "
                "frac_reward_zero_std is logged)"
            )
        made.metrics |= {
            "dynamic_sampling/rounds": float(done),
            "dynamic_sampling/replaced_prompts": float(lacked),
            "dynamic_sampling/frac_reward_zero_std_before": len(before) * size / (len(rows) * options.data_ranks),
        }
        return made, rows

    def _without_spread(self, made: Made, size: int) -> list[int]:
        """The groups of all ranks whose completions are rewarded alike."""
        options: Any = self.maker.options
        return options.advantages(self.maker.group_of(made, size)).without_spread.nonzero().flatten().tolist()

    def _drawn(self, window: Sequence[int]) -> Iterator[int]:
        """Rows in an order of the window's own; each again only after all others."""
        generator = torch.Generator().manual_seed(seed_of(self.maker.options.seed, PLACES, *window))  # type: ignore[attr-defined]
        return itertools.chain.from_iterable(
            torch.randperm(len(self.rows), generator=generator).tolist() for _ in itertools.count()
        )
