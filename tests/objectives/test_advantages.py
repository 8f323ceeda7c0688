"""Advantages against plain formulas in float64, and exactly 0 wherever the rewards of a group are equal."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from lowtide.objectives.advantages import (
    TINY,
    Advantages,
    deviation,
    leave_one_out,
    relative_to_group,
    summed_up,
    weighted,
)

NAN = math.nan
ONE = torch.ones(1, dtype=torch.float64)
WAYS = {
    **{scale: {"scale": scale} for scale in ("group", "batch", "none")},
    "each function first": {"aggregation": "normalize_then_sum"},
    "leave one out": {},
    "leave one out, normalized": {"normalize": True},
}
EQUAL = (1000.1, -12345.678, 0.1, 1e-30, 3e38, 16777217.0, -0.0, 1 / 3)


def advantages(way: str, rewards: Tensor, weights: Tensor, size: int) -> Advantages:
    if not way.startswith("leave"):
        return relative_to_group(rewards, weights, size, **WAYS[way])
    magnitude = summed_up(rewards, weights)
    return leave_one_out(weighted(rewards, weights), size, magnitude=magnitude, **WAYS[way])


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("reward", EQUAL)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_equal_rewards_teach_exactly_nothing(way, reward, size):
    found = advantages(way, column(*[reward] * size, *[reward] * size), ONE, size)
    assert found.values.tolist() == [0.0] * (2 * size)
    assert found.without_spread.tolist() == [True, True]


@pytest.mark.parametrize("reward", EQUAL)
@pytest.mark.parametrize("way", WAYS)
def test_nor_do_those_that_are_known_beside_others_and_beside_groups_that_differ(way, reward):
    found = advantages(
        way, column(reward, NAN, reward, reward, 1.0, 2.0, 4.0, 8.0, *[NAN] * 4, reward, *[NAN] * 3), ONE, 4
    )
    assert found.values[:4].tolist() == [0.0] * 4
    assert found.values[8:].tolist() == [0.0] * 8
    assert (found.values[4:8] != 0).all()
    assert found.without_spread.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "rewards",
    [
        [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.1, 0.3], [0.6, 0.0, 0.0]],
        [[1000.1, 0.2, 0.0], [1000.3, 0.0, 0.0], [0.0, 1000.1, 0.2], [0.3, 1000.0, 0.0]],
        [[1e6, 0.1, -1e6], [0.1, 0.0, 0.0], [0.0, NAN, 0.1], [-1e6, 1e6, 0.1]],
    ],
)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "each function first"])
def test_nor_do_sums_that_differ_by_their_rounding_alone(way, rewards):
    values = torch.tensor([*rewards, *rewards], dtype=torch.float64)
    found = advantages(way, values, torch.ones(3, dtype=torch.float64), 4)
    assert found.values.tolist() == [0.0] * 8
    assert found.without_spread.all()


def test_nor_do_weighted_sums():
    rewards = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    weights = torch.tensor([0.2, 0.6], dtype=torch.float64)
    assert 3 * 0.2 != 0.6
    for way in ("group", "batch", "none", "leave one out", "leave one out, normalized"):
        assert advantages(way, rewards, weights, 2).values.tolist() == [0.0, 0.0]


def test_nor_do_normalized_rewards_that_cancel():
    rewards = torch.tensor([[1, 0], [0, 1], [0.3, 0.3], [0, 1], [1, 3], [2, 0]], dtype=torch.float64)
    rewards[:3] = rewards[:3] * 0.7 + 1000.1
    found = relative_to_group(rewards, torch.ones(2), 3, aggregation="normalize_then_sum")
    mirrored = relative_to_group(
        torch.stack([rewards[:, 0], rewards[:, 0].mean() - rewards[:, 0]], 1),
        torch.ones(2),
        3,
        aggregation="normalize_then_sum",
    )
    assert found.without_spread.tolist() == [False, False]
    assert mirrored.values.tolist() == [0.0] * 6
    assert mirrored.without_spread.all()


@pytest.mark.parametrize("difference", [1e-2, 1e-4])
@pytest.mark.parametrize("way", WAYS)
def test_what_differs_is_learned_however_large_it_is(way, difference):
    """Two rewards that float32 would hold as one number."""
    found = advantages(way, column(1e6, 1e6 + difference), ONE, 2)
    below, above = found.values.tolist()
    assert above == pytest.approx(-below)
    assert above == pytest.approx(expected(way, [[1e6, 1e6 + difference]])[0][1], rel=1e-4)
    assert not found.without_spread.any()


def expected(way: str, groups: list[list[float]]) -> list[list[float]]:
    """By Python's statistics, of one function that scored all."""

    def spread(values: list[float]) -> float:
        return statistics.stdev(values)

    if way.startswith("leave"):
        found = [[value - (sum(each) - value) / (len(each) - 1) for value in each] for each in groups]
        every = [value for each in found for value in each]
        share = 1 / (spread(every) + TINY) if "normalized" in way else 1.0
        return [[value * share for value in each] for each in found]
    found = [[value - statistics.fmean(each) for value in each] for each in groups]
    if way == "none":
        return found
    if way == "batch":
        every = [value for each in groups for value in each]
        return [[value / (spread(every) + TINY) for value in each] for each in found]
    found = [[v / (spread(each) + TINY) for v in values] for values, each in zip(found, groups, strict=True)]
    if way == "group":
        return found
    every = [value for each in found for value in each]
    return [[value / (spread(every) + TINY) for value in each] for each in found]


@pytest.mark.parametrize("way", WAYS)
def test_advantages_are_those_of_the_formulas(way):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(12, generator=generator, dtype=torch.float64) * 3 + 5
    found = advantages(way, rewards[:, None], ONE, 4)
    wanted = torch.tensor(expected(way, rewards.view(3, 4).tolist()), dtype=torch.float64).view(-1)
    torch.testing.assert_close(found.values, wanted, rtol=1e-12, atol=1e-12)
    assert found.values.dtype == torch.float64


@pytest.mark.parametrize("way", WAYS)
def test_what_nothing_scored_is_as_if_it_were_not_there(way):
    rewards = [1.0, 4.0, 2.5, -1.0, 3.0, 3.5]
    whole = advantages(way, column(*rewards), ONE, 3).values
    holes = advantages(way, column(*rewards[:3], NAN, NAN, *rewards[3:]), ONE, 4).values
    torch.testing.assert_close(holes[[0, 1, 2, 5, 6, 7]], whole)
    assert holes[[3, 4]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_values_that_differ_by_their_rounding_alone_do_not_deviate(sign):
    values = sign * torch.tensor([[0.3, 0.1 + 0.2, 0.3], [0.3, 0.4, 0.5]], dtype=torch.float64)
    assert values[0].std() > 0
    assert deviation(values).flatten().tolist() == [0.0, pytest.approx(0.1)]


def test_deviations_are_exactly_0_of_equal_values():
    values = torch.tensor([[1000.1] * 6, [NAN] * 5 + [7.0], [NAN] * 6, [1.0, 2.0, NAN, 4.0, 5.0, 9.0]])
    found = deviation(values).flatten()
    assert found[:3].tolist() == [0.0] * 3
    assert found[3].item() == pytest.approx(statistics.stdev([1.0, 2.0, 4.0, 5.0, 9.0]))
