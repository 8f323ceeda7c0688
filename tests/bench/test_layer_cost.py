"""What a decoder layer costs on a GPU, as the planner traces it: the figures are kept here."""

import json

import pytest

from bench.layer_cost import __main__ as command
from bench.layer_cost.__main__ import CASES, layer_cost, main

STOCK = {
    "llama-8b-lora": (274, 80.6, 711.3, 745.7, 1.67),
    "llama-8b-qlora": (288, 22.6, 177.8, 186.4, 0.49),
    "qwen-0.5b-lora": (274, 21.0, 39.6, 48.5, 0.37),
    "qwen-0.5b-full": (150, 13.0, 46.7, 60.1, 0.23),
    "llama-8b-float8": (288, 78.4, 711.3, 745.7, 1.17),
    "llama-8b-full": (147, 53.4, 873.0, 924.6, 1.73),
    "llama-8b-full-float8": (162, 51.9, 934.6, 986.2, 1.33),
    "hybrid-recurrent-lora": (1626, 60.0, 175.6, 192.2, 2.93),
    "hybrid-attention-lora": (371, 24.9, 171.2, 187.8, 0.61),
}
"""Operations and gigabytes of a layer, TFLOP of all layers and of the step, seconds on an H200."""
FUSED = {
    "llama-8b-lora": (91, 32.1, 649.7, 684.1, 1.16),
    "llama-8b-qlora": (91, 9.0, 162.4, 171.0, 0.30),
    "qwen-0.5b-lora": (91, 8.8, 36.1, 45.1, 0.20),
    "qwen-0.5b-full": (53, 5.9, 46.7, 60.1, 0.12),
    "llama-8b-float8": (115, 33.6, 649.7, 684.1, 0.77),
    "llama-8b-full": (47, 22.7, 873.0, 924.6, 1.48),
    "llama-8b-full-float8": (67, 22.4, 873.0, 924.6, 1.05),
    "hybrid-recurrent-lora": (1489, 49.6, 162.5, 179.1, 2.53),
    "hybrid-attention-lora": (111, 10.3, 158.0, 174.7, 0.32),
}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_figures_of_layers_as_they_were_and_fused(case, fused):
    operations, gigabytes, of_layers, whole, seconds = (FUSED if fused else STOCK)[case]
    assert layer_cost(case, fused_layers=fused) == {
        "operations_per_layer": operations,
        "gigabytes_per_layer": pytest.approx(gigabytes, abs=0.05),
        "layers_teraflops": pytest.approx(of_layers, abs=0.05),
        "teraflops": pytest.approx(whole, abs=0.05),
        "predicted_seconds": pytest.approx(seconds, abs=0.005),
    }


def test_a_device_that_is_no_gpu_is_refused():
    with pytest.raises(ValueError, match="name a GPU, such as h200"):
        layer_cost("llama-8b-lora", "cpu")


def test_recorded_steps_are_compared_with_what_is_predicted(monkeypatch: pytest.MonkeyPatch, capsys):
    kind = {"kind": "side by side", "hardware": {"gpu": "NVIDIA H200"}}
    runs = {
        "llama-8b-lora, lowtide": {"equal_tokens_per_second": 16384},
        "llama-8b-qlora, lowtide-stock": {"equal_tokens_per_second": 2048},
        "llama-8b-lora, unsloth-packing": {"equal_tokens_per_second": 11033},
    }
    monkeypatch.setattr(command.results, "recorded", lambda: [kind | {"runs": runs}, {"kind": "large"}])
    asked: list[object] = []

    def predicts(seconds: float):
        def cost(*of: object, **options: object) -> dict[str, float]:
            asked.append((*of, options))
            return {"predicted_seconds": seconds}

        monkeypatch.setattr(command, "layer_cost", cost)

    predicts(1.1)
    assert main(["--recorded", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert asked == [
        ("llama-8b-lora", "h200", {"fused_layers": True}),
        ("llama-8b-qlora", "h200", {"fused_layers": False}),
    ]
    assert {run: each["error"] for run, each in found.items()} == {
        "llama-8b-lora, lowtide": pytest.approx(0.1),
        "llama-8b-qlora, lowtide-stock": pytest.approx(-0.45),
    }
    runs.pop("llama-8b-qlora, lowtide-stock")
    assert main(["--recorded"]) == 0
    assert capsys.readouterr().out == (
        "llama-8b-lora, lowtide on NVIDIA H200: measured 1.000 s, predicted 1.100 s, +10%\n"
    )
