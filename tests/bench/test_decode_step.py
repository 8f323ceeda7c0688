"""What a generated token asks of a GPU: the figures are kept here."""

import pytest

from bench.decode_step.__main__ import decode_step

STOCK = {
    **{"qwen-1.5b": (41, 1199), "qwen-1.5b-lora": (69, 1984), "llama-8b": (41, 1363), "llama-8b-lora": (69, 2260)},
    "hybrid-attention-lora": (99, 3227),
    "hybrid-recurrent-lora": (119, 3858),
}
"""Kernels of a layer, and of a step."""
FUSED = {
    **{"qwen-1.5b": (14, 443), "qwen-1.5b-lora": (27, 808), "llama-8b": (14, 499), "llama-8b-lora": (27, 916)},
    "hybrid-attention-lora": (33, 1115),
    "hybrid-recurrent-lora": (83, 2706),
}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", STOCK)
def test_figures_of_a_decode_step(case: str, fused: bool):
    per_layer, kernels = (FUSED if fused else STOCK)[case]
    assert decode_step(case, fused=fused) == {
        "kernels_per_layer": per_layer,
        "kernels": kernels,
        "host_reads": 0,
        "host_copies": 0,
        "capturable": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_merged_adapters_leave_the_layers_of_a_model_without_them(fused: bool):
    (merged, _), (unmerged, kernels) = ((FUSED if fused else STOCK)[case] for case in ("llama-8b", "llama-8b-lora"))
    found = decode_step("llama-8b-lora", fused=fused, merged=True)
    assert found["kernels_per_layer"] == merged
    assert found["kernels"] == kernels - 32 * (unmerged - merged)
    assert found["capturable"]
