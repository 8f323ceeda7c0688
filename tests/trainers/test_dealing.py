"""Rows of a step are dealt to ranks by their tokens, and no step has other rows for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from lowtide.trainers.order import DealtEvenly, deal_evenly

LENGTHS = np.array([1, 2, 3, 90, 80, 70, 4, 5, 60, 50, 6, 7, 9, 9, 9, 9])


def loads(steps: list[list[list[int]]], ranks: int) -> list[list[int]]:
    """Of each step, the tokens of each rank."""
    return [
        [sum(int(LENGTHS[row]) for batch in step[rank::ranks] for row in batch) for rank in range(ranks)]
        for step in steps
    ]


@pytest.mark.parametrize(("ranks", "size", "turns"), [(2, 4, 1), (2, 2, 2), (4, 2, 1), (4, 1, 4)])
def test_a_step_keeps_its_rows_and_ranks_get_equal_tokens(ranks, size, turns):
    plain = BatchSampler(SequentialSampler(range(len(LENGTHS))), size, drop_last=False)
    dealt = DealtEvenly(plain, LENGTHS, ranks, turns)
    assert len(dealt) == len(plain)
    before, after = (
        [batches[start : start + ranks * turns] for start in range(0, len(batches), ranks * turns)]
        for batches in ([*plain], [*dealt])
    )
    for old, new in zip(before, after, strict=True):
        assert sorted(itertools.chain(*old)) == sorted(itertools.chain(*new))
        assert [len(batch) for batch in new] == [size] * (ranks * turns)
    waited_for = [[max(tokens) for tokens in loads(steps, ranks)] for steps in (before, after)]
    assert all(new <= old for old, new in zip(*waited_for, strict=True))
    assert sum(waited_for[1]) < sum(waited_for[0])


def test_a_step_that_is_not_full_is_left_as_it_is():
    plain = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
    assert [*DealtEvenly(plain, LENGTHS, 2, 1)][2:] == [[4, 5], [6]]


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_dealing_never_makes_the_heaviest_rank_heavier(ranks, rows, data):
    lengths = [data.draw(st.lists(st.integers(0, 99), min_size=rows, max_size=rows)) for _ in range(ranks)]
    dealt = deal_evenly(lengths)
    assert sorted(itertools.chain(*dealt)) == [(rank, place) for rank in range(ranks) for place in range(rows)]
    assert {len(each) for each in dealt} == {rows}
    assert max(sum(lengths[r][p] for r, p in each) for each in dealt) <= max(map(sum, lengths))
