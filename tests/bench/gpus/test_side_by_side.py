"""The runs of `bench.side_by_side`: rows alike for all, and libraries where they lie."""

from __future__ import annotations

import pytest
import torch

from bench.measuring.results import recorded
from bench.side_by_side.__main__ import parse, surroundings, table
from bench.side_by_side.cases import CASES, CONTESTANTS, EQUAL, EQUAL_STEPS, UNEQUAL_STEPS
from bench.side_by_side.child import row_lengths


def test_rows_are_alike_for_all():
    steps = row_lengths(4)
    assert steps == row_lengths(4)
    assert [len(step) for step in steps] == [4] * (UNEQUAL_STEPS + EQUAL_STEPS)
    assert all(12 <= length <= 2048 for step in steps for length in step)
    assert steps[UNEQUAL_STEPS:] == [[EQUAL] * 4] * EQUAL_STEPS


def test_a_library_is_found_where_it_is_said_to_lie(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    assert surroundings("unsloth-packing", ["unsloth=there"]) == {"PYTHONPATH": "there:before"}
    assert surroundings("lowtide", ["unsloth=there"]) == {}


def test_what_is_recorded_is_of_known_runs():
    (found,) = (result for result in recorded() if result["kind"] == "side by side")
    for name in found["runs"]:
        case, contestant = name.split(", ")
        assert case in CASES
        assert contestant in CONTESTANTS


def test_figures_that_there_are_not_are_left_out():
    run = {"equal_tokens_per_second": 10.0, "unequal_tokens_per_second": 20.0}
    run |= {"equal_bytes": 3e9, "unequal_bytes": None, "reserved_bytes": None}
    shown = table({"llama-8b-lora, lowtide": run})
    assert [[*column.cells] for column in shown.columns][2:4] == [["10 tokens/s"], ["3.00 GB"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_is_needed(capsys):
    with pytest.raises(SystemExit):
        parse([])
    assert "take --small" in capsys.readouterr().err
