"""Truncation: against plain slicing of each row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.data.batches.token_rows import TokenRows, flatten
from lowtide.data.encode.truncation import Truncation, truncate

LIMIT = st.none() | st.integers(1, 8)


def rows_of(lists, prompt_lengths=None, labels=None):
    token_ids, offsets = flatten(lists)
    labels = token_ids if labels is None else flatten(labels)[0]
    prompts = None if prompt_lengths is None else np.array(prompt_lengths, dtype=np.int64)
    return TokenRows(token_ids, labels, offsets, prompts)


def lists_of(rows):
    return [part.tolist() for part in np.split(rows.token_ids, rows.offsets[1:-1])]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    LIMIT,
    LIMIT,
    LIMIT,
    st.sampled_from(["keep_start", "keep_end"]),
)
def test_keeps_what_slicing_each_row_keeps(shapes, max_length, max_prompt, max_completion, mode):
    truncation = Truncation(
        max_length=max_length, mode=mode, max_prompt_length=max_prompt, max_completion_length=max_completion
    )
    prompts = [list(range(100, 100 + prompt)) for prompt, _ in shapes]
    completions = [list(range(200, 200 + completion)) for _, completion in shapes]
    expected = []
    for prompt, completion in zip(prompts, completions, strict=True):
        row = (prompt[-max_prompt:] if max_prompt else prompt) + completion[:max_completion]
        expected.append(row[:max_length] if mode == "keep_start" or not max_length else row[-max_length:])

    whole = rows_of([p + c for p, c in zip(prompts, completions, strict=True)], [p for p, _ in shapes])
    kept, cut = truncate(whole, truncation)

    assert lists_of(kept) == expected
    assert cut.tolist() == [p + c - len(row) for (p, c), row in zip(shapes, expected, strict=True)]
    assert kept.prompt_lengths.tolist() == [sum(token < 200 for token in row) for row in expected]


def test_the_first_token_of_a_row_is_never_scored():
    rows = rows_of([[5, 6, 7, 8], [5], []], labels=[[5, 6, -100, 8], [5], []])
    assert rows.scored_counts().tolist() == [2, 0, 0]


def test_keep_end_may_leave_a_single_scored_label_first_which_does_not_count():
    rows = rows_of([[5, 6, 7, 8]], labels=[[-100, -100, 7, -100]])
    kept, cut = truncate(rows, Truncation(max_length=2, mode="keep_end"))
    assert kept.labels.tolist() == [7, -100]
    assert kept.scored_counts().tolist() == [0]
    assert cut.tolist() == [2]


def test_nothing_is_copied_where_nothing_is_cut():
    rows = rows_of([[1, 2], [3]])
    assert truncate(rows, Truncation(max_length=2))[0] is rows


@pytest.mark.parametrize("name", ["max_length", "max_prompt_length", "max_completion_length"])
@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(name, limit):
    with pytest.raises(ValueError, match=f"{name} is {limit}; it must be at least 1"):
        Truncation(**{name: limit})


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'keep_start' or 'keep_end'"):
        Truncation(mode="middle")
