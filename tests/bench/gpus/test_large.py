"""Large shapes are predicted where there is no GPU, as the runs on one are set up."""

import dataclasses

import pytest

from bench.large import child as large_child
from bench.large.__main__ import line, parse
from bench.large.cases import CASES
from tests.support.marks import slow_but

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALLER = {**SMALL, "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 4000}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["4 layers of a 70B, QLoRA, streamed"], CASES))
def test_a_run_is_predicted_for_a_gpu_that_is_not_here(name):
    case = CASES[name]
    options = {**case.options, **({"tokens_per_microbatch": 64} if "pieces" in name else {})}
    small = dataclasses.replace(case, shape={**case.shape, **SMALLER}, length=256, options=options)
    found = large_child.predicted(small, "NVIDIA H200")
    assert 0 < found["allocated_bytes"] < 2 * found["reserved_bytes"] < 2e9
    waits = "stream" in case.options.values() or {"chain_storage", "activation_offloading"} & case.options.keys()
    rows = 1 << 17  # more than those of a step take on the host
    assert (found["host_bytes"] > rows) == bool(waits)
    assert "predicted" in line(name, {"predicted": found})


def test_a_gpu_is_named_where_there_is_none():
    assert parse(["--predict", "NVIDIA H200"]).hardware["gpu"] == "NVIDIA H200"
    assert parse(["--predict", "NVIDIA B200"]).hardware == {}
