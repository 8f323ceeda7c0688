"""The flat loop of direct preference optimization learns, and computes each prompt once."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_minimal_dpo_learns_which_answers_are_preferred():
    names = runpy.run_path(str(EXAMPLES / "minimal_dpo.py"), run_name="__main__")
    pairs, batch = names["pairs"], names["batch"]
    assert batch.tokens < batch.repeated_tokens
    assert (pairs.chosen_ratio > pairs.rejected_ratio).float().mean() > 0.7
    assert names["loss"].item() < 0.65
