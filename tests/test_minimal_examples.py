"""The flat loop of direct preference optimization learns, and computes each prompt once."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_minimal_dpo_learns_which_answers_are_preferred():
    names = runpy.run_path(str(EXAMPLES / "minimal_dpo.py"), run_name="__main__")
    pairs, batch = names["pairs"], names["batch"]
    assert batch.tokens < batch.repeated_tokens
    assert (pairs.chosen_ratio > pairs.rejected_ratio).float().mean() > 0.7
    assert names["loss"].item() < 0.65


@pytest.mark.slow
def test_a_loop_of_ones_own_around_the_runner_learns(capsys):
    names = runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    assert names["answer"].tolist()[:6] == [5, 1, 4, 1, 3, names["STOP"]]
    assert names["loss"].item() < 0.1
    assert not names["runner"].begun
