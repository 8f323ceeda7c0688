"""Which rows of a dataset make the heaviest micro-batches, and which have more tokens than a model has positions."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from lowtide.data.batches.heaviest import check_positions, heaviest_batch, heaviest_rows, longest_row, row_lengths
from lowtide.data.batches.shared_rounds import WholeRounds


def rows(*lengths: int) -> list[list[int]]:
    return [[3] * length for length in lengths]


DATASETS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "texts": ({"input_ids": rows(4, 9, 2), "position_ids": rows(40, 9, 2)}, [4, 9, 2]),
    "packed": ({"input_ids": rows(9, 8), "seq_lengths": [[2, 6, 1], [5, 3]]}, [6, 5]),
    "rounds": (
        {
            "input_ids": rows(11, 4),
            "seq_lengths": [[6, 2, 3], [4]],
            "prefix": [[-1, 0, 0], [-1]],
            "prefix_length": [[-1, 5, -1], [-1]],
        },
        [9, 4],
    ),
    "pairs": ({"prompt_ids": rows(2, 3), "chosen_ids": rows(4, 1), "rejected_ids": rows(1, 5)}, [6, 8]),
    "prompts": ({"prompt_ids": rows(5, 3), "answer": ["a", "b"]}, [5, 3]),
}
"""Rows, and the positions that each takes."""


@pytest.mark.parametrize("kind", DATASETS)
def test_the_longest_row_is_refused_where_a_model_has_one_position_less(kind):
    columns, positions = DATASETS[kind]
    dataset, longest = Dataset.from_dict(columns), int(np.argmax(positions))
    assert longest_row(dataset) == max(positions)
    check_positions(dataset, max(positions), "the data")
    with pytest.raises(ValueError, match=rf"row {longest} of the data has {max(positions)} tokens"):
        check_positions(dataset, max(positions) - 1, "the data")


def test_completions_that_are_written_take_positions_too():
    dataset = Dataset.from_dict({"prompt_ids": rows(5, 3)})
    check_positions(dataset, 9, "the data", written=4)
    with pytest.raises(ValueError, match=r"row 0 of the data has a prompt of 5 tokens.*set max_prompt_length=4,"):
        check_positions(dataset, 8, "the data", written=4)


@pytest.mark.parametrize(
    "columns", [{"text": ["a"]}, {"row_ids": [1]}, {"prompt_ids": rows(5), "row_ids": [1]}, {"input_ids": ["a"]}]
)
def test_nothing_is_known_of_rows_that_are_no_lists_of_tokens(columns):
    dataset = Dataset.from_dict(columns)
    assert longest_row(dataset) == 0
    assert row_lengths(dataset) is None
    check_positions(dataset, 1, "the data")


def test_rounds_that_a_model_runs_whole_count_what_they_go_on_from():
    dataset = Dataset.from_dict(DATASETS["rounds"][0])
    assert row_lengths(dataset).tolist() == [11, 4]
    assert row_lengths(dataset, WholeRounds(list)).tolist() == [22, 4]


def test_rows_count_what_is_computed():
    dataset = Dataset.from_dict(DATASETS["pairs"][0])
    collator = SimpleNamespace(sharing=False, apart=("rejected_ids",))
    assert row_lengths(dataset).tolist() == [7, 9]
    assert row_lengths(dataset, collator).tolist() == [9, 12]
    assert row_lengths(dataset, collator, trained=True).tolist() == [6, 4]


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("budget", [None, 20, 31, 40])
def test_the_heaviest_rows_are_those_of_a_search_of_all(most, budget):
    """The longest rows go together; where a budget cuts them off, the micro-batch that fills it best is found too."""
    for seed in range(8):
        lengths = np.random.default_rng(seed).integers(5, 32, 7)
        found = heaviest_rows(lengths, most, budget)
        fits = [
            lengths[list(each)].sum()
            for count in range(1, most + 1)
            for each in combinations(range(len(lengths)), count)
            if budget is None or lengths[list(each)].sum() <= budget
        ]
        together = [lengths[each].sum() for each in found]
        above = budget is not None and lengths.max() > budget
        assert heaviest_batch(lengths, most, budget) == (found[0] if above else found[-1])
        if above:
            assert found[0] == [int(lengths.argmax())]
            together = together[1:]
        else:
            assert lengths[found[0]].max() == lengths.max()
        assert all(total in fits for total in together), "each is a micro-batch that the limits allow"
        if budget is None or most <= 2:
            assert together[-1:] == [max(fits)] if fits else not together
        assert together == sorted(set(together)), "a second micro-batch is heavier than the first"
