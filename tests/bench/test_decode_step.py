"""What a generated token asks of a GPU: the figures are kept here."""

import pytest

from bench.decode_step.__main__ import decode_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "per_layer", "kernels"),
    [("qwen-1.5b", 46, 1392), ("qwen-1.5b-lora", 74, 2177), ("llama-8b", 46, 1574), ("llama-8b-lora", 74, 2471)],
)
def test_figures_of_a_decode_step(case: str, per_layer: int, kernels: int):
    assert decode_step(case) == {
        "kernels_per_layer": per_layer,
        "kernels": kernels,
        "host_reads": 0,
        "host_copies": 0,
        "capturable": True,
    }
