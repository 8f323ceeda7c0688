"""The grid of the page of devices is what the planner says."""

import pytest

from bench.page_grid.tracing import traced
from lowtide.planner.answers.page import grid


@pytest.mark.slow
def test_a_number_of_the_grid_is_what_a_trace_says():
    found = grid()
    shape = found["models"]["HuggingFaceTB/SmolLM2-135M"]
    again = traced(("HuggingFaceTB/SmolLM2-135M", "sft", "LoRA", "LoRA checkpointing"))
    assert again["peaks"] == found["peaks"][shape]["sft"]["LoRA checkpointing"]
