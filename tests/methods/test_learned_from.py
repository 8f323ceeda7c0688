"""What methods whose policy writes make of rewarded completions: advantages, preferences, and what they report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.data.batches.values import TOKEN_ADVANTAGE, WINDOW_TOKENS
from lowtide.methods.online.grpo import GRPOOptions
from lowtide.methods.online.learning import ByAdvantage, GroupRewards, Rewarded
from lowtide.methods.online.online_dpo import METHOD as ONLINE_DPO
from lowtide.methods.online.online_dpo import PREFERENCE, OnlineDPOOptions
from lowtide.methods.online.rloo import RLOOOptions
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rollout import Rollout

LENGTHS = [3, 1, 4, 2, 5, 2]


def rewarded(rewards: list[float], size: int, *, ended: str = "111111", evaluated: bool = False) -> Rewarded:
    completions = [
        Completion([7] * length, [0.0] * length, [0.0] * length, [True] * length, "stop" if end == "1" else "length")
        for length, end in zip(LENGTHS, ended, strict=True)
    ]
    rollout = Rollout([[5, 6]] * len(LENGTHS), completions, 0)
    group = GroupRewards(torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(1), size)
    return Rewarded(rollout, group, slice(0, len(LENGTHS)), torch.device("cpu"), evaluated=evaluated)


@pytest.mark.parametrize("evaluated", [False, True])
def test_advantages_and_the_tokens_of_a_step(evaluated):
    """A rollout is learned from in 4 steps of 2 micro-batches; of three groups the last has equal rewards."""
    options: Any = GRPOOptions(steps_per_generation=8, scale_rewards="none")
    options.gradient_accumulation_steps = 2
    found = ByAdvantage().learn(rewarded([1.0, 2.0, 5.0, math.nan, 3.0, 3.0], 2, evaluated=evaluated), options)
    assert found.values.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    of_tokens = found.score_values[TOKEN_ADVANTAGE].split(LENGTHS)
    assert [part.tolist() for part in of_tokens] == [
        [value] * length for value, length in zip(found.values.tolist(), LENGTHS, strict=True)
    ]
    assert found.row_values[WINDOW_TOKENS].tolist() == [0.0 if evaluated else 17 * 2 / 8] * 6
    assert found.metrics == {"frac_reward_zero_std": pytest.approx(2 / 3)}


def test_metrics_leave_out_what_fills_up_an_evaluations_last_batch():
    """Of three groups, the last is there again."""
    made = replace(rewarded([1.0, 1.0, 5.0, 4.0, 1.0, 1.0], 2, ended="010111"), reported=4)
    assert made.own_reported == 4
    assert [replace(made, own=slice(at, at + 6)).own_reported for at in (2, 4, 6)] == [2, 0, 0]
    options: Any = GRPOOptions(steps_per_generation=8)
    options.gradient_accumulation_steps = 2
    assert ByAdvantage().learn(made, options).metrics == {"frac_reward_zero_std": 0.5}
    layout: Any = ONLINE_DPO.rows
    assert layout.learning.learn(made, OnlineDPOOptions()).metrics == {
        "objective/scores": 11 / 4,
        "objective/scores_margin": 0.5,
        "val/contain_eos_token": 0.5,
    }


@pytest.mark.parametrize("huge", [1e18, -1e18])
def test_rewards_that_are_clipped_are_compared_by_what_they_are_clipped_to(huge):
    """The rounding of a number that the clip replaces hides no other difference."""
    options = RLOOOptions(reward_clip_range=[-1.0, 1.0], beta=0.0)
    group = rewarded([huge, 0.5, 0.25, 0.1 + 0.2, 0.3, 0.3], 3).group
    edge = math.copysign(1.0, huge)
    expected = [edge - 0.375, 0.5 - (edge + 0.25) / 2, 0.25 - (edge + 0.5) / 2, 0.0, 0.0, 0.0]
    found = options.advantages(group)
    assert found.values.tolist() == pytest.approx(expected, abs=1e-12)
    assert found.values[3:].tolist() == [0.0] * 3
    assert found.without_spread.tolist() == [False, True]


def test_the_better_completion_of_a_pair_is_preferred():
    """The end that the first lacks costs it its lead; of the last pair nothing scored one completion."""
    options = OnlineDPOOptions(missing_eos_penalty=2.0)
    layout: Any = ONLINE_DPO.rows
    found = layout.learning.learn(rewarded([3.0, 2.0, 1.0, 4.0, 5.0, math.nan], 2, ended="011111"), options)
    assert found.row_values[PREFERENCE].tolist() == [-1, 1, -1, 1, 0, 0]
    assert found.metrics == pytest.approx(
        {
            "objective/scores": (1.0 + 2.0 + 1.0 + 4.0 + 5.0) / 5,
            "objective/scores_margin": (1.0 + 3.0) / 2,
            "val/contain_eos_token": 5 / 6,
        }
    )
    equal = layout.learning.learn(rewarded([1.0] * 6, 2), options)
    assert equal.row_values[PREFERENCE].tolist() == [1, -1] * 3


@pytest.mark.parametrize("sharing", [True, False])
def test_pairs_are_rows_whose_chosen_completion_comes_first(sharing):
    """The second was preferred of the first pair and of the second, and none of the third."""
    layout: Any = ONLINE_DPO.rows
    known = rewarded([1.0, 2.0, 1.0, 4.0, math.nan, 5.0], 2)
    rollout = known.rollout
    for number, each in enumerate(rollout.completions):
        each.token_ids[:] = [10 + number] * LENGTHS[number]
    rollout.row_values.update(layout.learning.learn(known, OnlineDPOOptions(beta=[0.25, 0.5])).row_values)
    batch = layout.learning.batch(rollout, [2, 0, 1], sharing=sharing)
    order = [4, 5, 1, 0, 3, 2]
    prompt = [] if sharing else [5, 6]
    expected = [[*prompt, *[10 + number] * LENGTHS[number]] for number in order]
    segments = [batch.token_ids[each.start : each.stop].tolist() for each in batch.segments]
    assert [each for each in segments if each != [5, 6]] == expected
    assert len(segments) == (9 if sharing else 6)
    assert {name: values.tolist() for name, values in batch.row_values.items()} == {
        "lengths": [[5, 2], [1, 3], [2, 4]],
        "decided": [False, True, True],
        "beta": [0.25] * 3,
        "reward": [[0.0, 5.0], [2.0, 1.0], [4.0, 1.0]],
    }
