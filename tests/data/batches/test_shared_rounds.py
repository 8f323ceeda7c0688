"""Rounds of a conversation as a tree: what is laid once, and that whole rounds come out of it again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.data.batches.shared_rounds import Sharing, WholeRounds, share_rounds, whole_rounds
from lowtide.data.batches.token_rows import TokenRows, flatten

ROUNDS = st.lists(
    st.lists(
        st.lists(st.tuples(st.integers(1, 2), st.booleans()), min_size=0, max_size=7).filter(
            lambda row: not row or any(scored for _, scored in row[1:])
        ),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=3,
)
"""Conversations of rounds, of tokens that are scored or not; a round without tokens lost all of them to a limit."""


def token_rows(talks):
    rows = [row for talk in talks for row in talk]
    tokens, offsets = flatten([[token for token, _ in row] for row in rows])
    scored = [is_scored for row in rows for _, is_scored in row]
    labels = np.where(np.array(scored, dtype=bool), tokens, -100)
    return TokenRows(tokens, labels, offsets, groups=np.cumsum([0, *map(len, talks)]))


def as_rows(talks, sharing):
    """Each conversation as a row of a prepared dataset."""
    laid, prefix, seen = share_rounds(token_rows(talks), sharing)
    found = []
    for start, stop in zip(laid.groups[:-1], laid.groups[1:], strict=True):
        tokens = slice(laid.offsets[start], laid.offsets[stop])
        found.append(
            {
                "input_ids": laid.token_ids[tokens].tolist(),
                "labels": laid.labels[tokens].tolist(),
                "seq_lengths": laid.lengths[start:stop].tolist(),
                "prefix": prefix[start:stop].tolist(),
                "prefix_length": seen[start:stop].tolist(),
            }
        )
    return found


def rounds_in(row):
    """The rounds of a row: tokens and what is scored of them, behind the first."""
    ends = np.cumsum(row["seq_lengths"])
    found = []
    for start, end in zip(ends - row["seq_lengths"], ends, strict=True):
        labels = [-100, *row["labels"][start + 1 : end]]
        found.append((row["input_ids"][start:end], labels))
    return sorted(found)


@given(talks=ROUNDS, most=st.none() | st.integers(7, 20))
def test_whole_rounds_come_out_of_what_is_laid_once(talks, most):
    for talk, row in zip(talks, as_rows(talks, Sharing(most)), strict=True):
        if not row["seq_lengths"]:
            assert not any(talk)
            continue
        pairs = [([token for token, _ in each], [token if is_scored else -100 for token, is_scored in each])
                 for each in talk if each]  # fmt: skip
        expected = sorted((tokens, [-100, *labels[1:]]) for tokens, labels in pairs)
        assert rounds_in(whole_rounds(row)) == expected
        firsts = [number for number, before in enumerate(row["prefix"]) if before < 0]
        ends = [*firsts[1:], len(row["prefix"])]
        for first, end in zip(firsts, ends, strict=True):  # those that go on from it stand behind it
            assert row["prefix"][first + 1 : end] == [first] * (end - first - 1)
            assert most is None or sum(row["seq_lengths"][first:end]) <= most


@given(talks=ROUNDS)
def test_rounds_that_share_nothing_are_laid_as_they_were(talks):
    for talk, row in zip(talks, as_rows(talks, None), strict=True):
        assert row["input_ids"] == [token for each in talk for token, _ in each]
        assert {*row["prefix"], *row["prefix_length"]} <= {-1}


def scored_from(tokens, first):
    return [(token, place >= first) for place, token in enumerate(tokens)]


def test_the_round_with_most_in_common_is_laid_whole():
    talk = [scored_from([1, 2, 3], 2), scored_from([1, 2, 4, 5, 6, 7], 4), scored_from([1, 2, 4, 5, 8], 4)]
    [row] = as_rows([talk], Sharing())
    assert row == {
        "input_ids": [1, 2, 4, 5, 8, 3, 6, 7],
        "labels": [-100, -100, -100, -100, 8, 3, 6, 7],
        "seq_lengths": [5, 1, 2],
        "prefix": [-1, 0, 0],
        "prefix_length": [-1, 2, 4],
    }


def test_a_round_goes_on_no_further_than_to_its_own_first_scored_token():
    """The target of a scored token is its own, though both rounds say the same there."""
    [row] = as_rows([[scored_from([1, 2, 3], 1), scored_from([1, 2, 4], 1)]], Sharing())
    assert (row["seq_lengths"], row["prefix_length"]) == ([3, 2], [-1, 1])
    assert row["labels"] == [-100, 2, 4, 2, 3]


def test_a_family_takes_no_more_than_a_bin():
    talk = [scored_from([1, 2, last], 2) for last in (3, 4, 5)]
    [row] = as_rows([talk], Sharing(4))
    assert (row["seq_lengths"], row["prefix"]) == ([3, 1, 3], [-1, 0, -1])


def test_rows_of_others_may_leave_out_how_much_is_seen():
    row = {"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 1, 1], "prefix": [-1, 0, -1]}
    expected = {"input_ids": [1, 2, 1, 2, 3, 4], "labels": [1, 2, -100, -100, 3, 4], "seq_lengths": [2, 3, 1]}
    assert whole_rounds(row) == expected
    assert whole_rounds({**row, "prefix_length": [-1, 1, -1]})["input_ids"] == [1, 2, 1, 3, 4]
    assert WholeRounds(list)([row]) == [expected]


@pytest.mark.parametrize("row", [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "seq_lengths": [1, 1], "labels": [1, 2]}])
def test_other_rows_are_as_they_were(row):
    assert whole_rounds(row) == row
