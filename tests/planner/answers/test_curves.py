"""Lines between traced sizes."""

from __future__ import annotations

import pytest

from lowtide.planner.answers.curves import Curve, Point
from lowtide.planner.devices import DEVICES

DEVICE = DEVICES["A100-40GB"]


def point(tokens: int, **phases: int) -> Point:
    return Point(tokens, 1, 1.0, {}, {DEVICE.workspaces: phases})


CURVE = Curve([point(100, optimizer=5000, backward=1000), point(1100, optimizer=5000, backward=11_000)])


@pytest.mark.parametrize(
    ("tokens", "peak"),
    [(1, 5000), (100, 5000), (500, 5000), (600, 6000), (1100, 11_000), (2100, 21_000)],
)
def test_the_peak_is_that_of_the_fullest_phase(tokens, peak):
    assert CURVE.peak(tokens, DEVICE, beside=7) == peak + 7


def test_the_most_tokens_are_those_that_still_fit():
    most = CURVE.most_tokens(8000, DEVICE, 0, 10_000)
    assert most == 800
    assert CURVE.peak(most, DEVICE, 0) <= 8000 < CURVE.peak(most + 1, DEVICE, 0)
    assert CURVE.most_tokens(4999, DEVICE, 0, 10_000) == 0
    assert CURVE.most_tokens(1e9, DEVICE, 0, 900) == 900


def test_three_sizes_are_two_lines():
    curve = Curve([point(10, step=10), point(20, step=30), point(40, step=130)])
    assert [curve.peak(tokens, DEVICE, 0) for tokens in (15, 20, 30, 60)] == [20, 30, 80, 230]


def test_one_size_is_all_that_is_known():
    curve = Curve([point(10, step=10)])
    assert curve.peak(1000, DEVICE, 0) == 10
    assert curve.most_tokens(1e9, DEVICE, 0, 1000) == 10
