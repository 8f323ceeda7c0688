"""How completions are drawn, which of their rows make the heaviest micro-batch, and what ranks know of each other's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.data.batches.values import OLD, REFERENCE, TOKEN_ADVANTAGE, WINDOW_TOKENS
from lowtide.data.prompts import PROMPT_IDS
from lowtide.methods.online import learning
from lowtide.methods.online.grpo import GRPOOptions
from lowtide.methods.online.learning import ByAdvantage, GroupRewards, Rewarded
from lowtide.methods.online.online_dpo import Preferred
from lowtide.methods.online.ppo import moments
from lowtide.methods.online.rloo import LessDivergence, RLOOOptions
from lowtide.methods.online.rollouts import LongestGroups
from lowtide.rollout.generators.generator import Completion, Sampling
from lowtide.rollout.rollout import Rollout

MOST = GRPOOptions().max_completion_length
DRAWN: dict[str, tuple[dict[str, Any], Sampling]] = {
    "defaults": ({}, Sampling(MOST)),
    "all": (
        {"max_completion_length": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125},
        Sampling(7, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125),
    ),
    "no top_k": ({"top_k": -1, "repetition_penalty": 1.5}, Sampling(MOST, top_k=0, repetition_penalty=1.5)),
    "further settings": (
        {"generation_kwargs": {"do_sample": True, "min_p": 0.5, "stop_strings": "ab", "num_beams": 2}},
        Sampling(MOST, min_p=0.5, stop_strings=("ab",), others={"num_beams": 2}),
    ),
    "greedy": ({"top_k": 4, "generation_kwargs": {"do_sample": False}}, Sampling(MOST, temperature=0.0, top_k=4)),
}


@pytest.mark.parametrize("case", DRAWN)
def test_tokens_are_drawn_as_the_options_say(case):
    given, expected = DRAWN[case]
    assert GRPOOptions(**given).sampling([2, 9]) == replace(expected, stop_ids=(2, 9))


# -- the heaviest micro-batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ByAdvantage, Preferred])
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("budget", [None, 30, 47])
def test_rehearsed_rows_fill_the_budget_with_completions_of_full_length(kind, sharing, budget):
    """Also where a single row is above the budget."""
    groups = LongestGroups(kind(), count=4, most=5, budget=budget, sharing=sharing)
    for tokens in (1, 2, 6, 11, 20, 60):
        each = kind.completions

        def computed(rows: int, tokens: int = tokens, each: int = each) -> int:
            return rows * each * 5 + tokens * (1 if sharing else rows * each)

        fitting = [rows for rows in range(1, 5) if budget is None or computed(rows) <= budget]
        batch = groups([{PROMPT_IDS: list(range(tokens))}])
        assert batch.rows == max(fitting, default=1)
        assert computed(batch.rows) == groups.lengths(np.array([tokens]))[0]
        assert batch.scores == batch.rows * each * 5


# -- ranks -------------------------------------------------------------------------------------------------------------

LENGTHS = [3, 1, 4, 2]


def rewarded(rewards: list[float]) -> Rewarded:
    """Of the first of two ranks, which wrote the first half of the completions."""
    completions = [Completion([7] * length, [0.0] * length, [0.0] * length, [True] * length) for length in LENGTHS]
    group = GroupRewards(torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(1), 2)
    return Rewarded(Rollout([[5, 6]] * len(LENGTHS), completions, 0), group, slice(0, 4), torch.device("cpu"))


@pytest.fixture
def of_the_other(monkeypatch) -> list[torch.Tensor]:
    """What the second rank adds to what is gathered, one time after the other."""
    others: list[torch.Tensor] = []
    monkeypatch.setattr(learning, "gathered", lambda own, copies: torch.cat([own, others.pop(0).to(own)]))
    return others


def test_what_is_known_of_all_ranks(of_the_other):
    mine = rewarded([1.0] * 8)
    of_the_other += [torch.tensor([-2.0])] * 3
    assert mine.smallest(torch.tensor([3.0, 1.0])) == -2.0
    assert mine.smallest(torch.tensor([3.0, -5.0])) == -5.0
    assert mine.smallest(torch.tensor([])) == -2.0
    of_the_other.append(torch.tensor([torch.inf]))
    assert mine.smallest(torch.tensor([])) == 0.0, "no rank has a value"
    of_the_other.append(torch.tensor([[10.0, 20.0]]))
    assert mine.summed(1.0, torch.tensor(2.0)) == [11.0, 22.0]


def test_a_step_counts_the_tokens_of_all_ranks_and_takes_the_advantages_of_its_own(of_the_other):
    options: Any = GRPOOptions(steps_per_generation=2, scale_rewards="none")
    options.gradient_accumulation_steps = 1
    of_the_other.append(torch.tensor([[30.0]]))
    found = ByAdvantage().learn(rewarded([1.0, 3.0, 2.0, 2.0, 0.0, 8.0, 5.0, 7.0]), options)
    assert found.values.tolist() == [-1.0, 1.0, 0.0, 0.0, -4.0, 4.0, -1.0, 1.0]
    of_tokens = found.score_values[TOKEN_ADVANTAGE].split(LENGTHS)
    assert [set(part.tolist()) for part in of_tokens] == [{-1.0}, {1.0}, {0.0}, {0.0}]
    assert found.row_values[WINDOW_TOKENS].tolist() == [(sum(LENGTHS) + 30) / 2] * 4
    assert found.metrics == {"frac_reward_zero_std": 1 / 4}


def test_divergence_is_a_part_of_the_reward_and_a_mean_over_the_tokens_of_all_ranks(of_the_other):
    options: Any = RLOOOptions(beta=0.5, steps_per_generation=1)
    options.gradient_accumulation_steps = 1
    mine, nats = rewarded([1.0, 3.0, 2.0, 2.0, 0.0, 8.0, 5.0, 7.0]), torch.arange(10.0) / 10
    mine.rollout.score_values.update({OLD: nats, REFERENCE: torch.zeros(10)})
    of_the_other += [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([[30.0]]), torch.tensor([[10.0, 30.0]])]
    found = LessDivergence().learn(mine, options)
    divergence = torch.tensor([0.0 + 0.1 + 0.2, 0.3, 0.4 + 0.5 + 0.6 + 0.7, 0.8 + 0.9, 1.0, 2.0, 3.0, 4.0])
    total = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 8.0, 5.0, 7.0]) - 0.5 * divergence
    pairs = total.view(-1, 2)
    torch.testing.assert_close(found.values.float(), (pairs - pairs.flip(1)).flatten())
    assert found.metrics["kl"] == pytest.approx((4.5 + 10.0) / (10 + 30))


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_moments_are_those_of_the_tokens_that_take_part(count):
    values, alone = torch.tensor([2.5, -1.0, 4.0, 0.5, 7.0, 100.0], dtype=torch.float64), rewarded([1.0] * 8)
    taking_part = torch.arange(6) < count
    wanted = values[:count]
    expected = (wanted.mean().item() if count else 0.0, wanted.var().item() if count > 1 else 0.0)
    assert moments(values, taking_part, alone) == pytest.approx(expected)
    assert moments(torch.full_like(values, 0.1), taking_part, alone) == (0.1 if count else 0.0, 0.0)
