"""What a generated token asks of a GPU: the figures are kept here."""

import pytest

from bench.decode_step.__main__ import decode_step


@pytest.mark.slow
@pytest.mark.parametrize(("case", "per_layer", "kernels"), [("qwen-1.5b", 68, 2000), ("llama-8b-lora", 96, 3167)])
def test_figures_of_a_decode_step(case: str, per_layer: int, kernels: int):
    found = decode_step(case)
    assert (found["kernels_per_layer"], found["kernels"]) == (per_layer, kernels)
    assert (found["host_reads"], found["host_copies"]) == (1, 2)
    assert not found["capturable"]
    assert found["reason"].startswith("the host reads the device")
