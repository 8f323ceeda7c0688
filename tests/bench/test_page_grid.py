"""The grid of the page of devices and of `lowtide gpus` is what the planner says."""

import numpy as np
import pytest

from bench.page_grid.tracing import traced
from lowtide.planner.answers.kept_grid import grid
from lowtide.planning import gpus

MODEL = "HuggingFaceTB/SmolLM2-135M"
OLD = {"peaks": 0.002, "seconds": 0.15}
"""How far, relatively, the grid may be from what is traced today: hours go into it, for all models, and a prediction
promises no more."""


@pytest.mark.slow
def test_all_numbers_of_a_model_are_what_traces_say():
    found = grid()
    again = traced((MODEL, "sft"))
    assert not isinstance(again, str)
    for part in ("peaks", "seconds"):
        kept = found[part][found["models"][MODEL]]["sft"]
        assert again[part].keys() == kept.keys()
        for way, numbers in kept.items():
            assert np.array(again[part][way]) == pytest.approx(np.array(numbers), rel=OLD[part]), (part, way)


@pytest.mark.slow
def test_a_trace_of_longer_rows_says_of_adapters_what_the_grid_says():
    """The grid has as many tokens in rows of 1,024. With all weights it says more than a trace: offloaded activations
    are taken to grow as those that stay."""
    kept, own = (
        gpus("sft", "Qwen/Qwen2.5-7B", device="H100-80GB", lengths="4096x4", trace=trace) for trace in (False, True)
    )
    for way, fit in own.rows[0].fits.items():
        said = kept.rows[0].fits[way]
        assert said.fits == fit.fits, way
        assert said.peak_bytes >= 0.99 * fit.peak_bytes, way
        if way in ("LoRA", "QLoRA"):
            assert said.settings == fit.settings, way
            assert said.peak_bytes == pytest.approx(fit.peak_bytes, rel=0.02), way
            assert said.tokens_per_second == pytest.approx(fit.tokens_per_second, rel=0.02), way
