"""Both ways of the benchmark of recurrent layers compute the same."""

from typing import Any

import pytest

from bench.generation import contestants
from bench.inputs.shapes import Shape
from bench.recurrent import child
from bench.recurrent.__main__ import TARGETS
from bench.recurrent.tables import recurrent_section

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
HEADS = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16}


def smaller(shape: Shape) -> Shape:
    given = {**SMALL, **HEADS, "num_hidden_layers": 2, "mamba_d_state": 8, "attn_layer_indices": [1]}
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if "layer_types" in shape.config else {}
    return Shape(
        {**shape.config, **{name: given.get(name, value) for name, value in shape.config.items()}, **kinds},
        **{"device": shape.device, "dtype": shape.dtype},
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MODELS", {name: smaller(shape) for name, shape in child.MODELS.items()})
    monkeypatch.setattr(child, "LENGTHS", range(3, 12, 3))
    monkeypatch.setattr(child, "PROMPT", 9)
    monkeypatch.setattr(child, "COMPLETIONS", range(2, 8, 2))
    for name, value in {"PROMPTS": 2, "MOST": 5, "FEWEST": 3, "PROMPT_LENGTHS": (4, 9)}.items():
        monkeypatch.setattr(contestants, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("model", TARGETS["rows"])
@pytest.mark.parametrize("what", ["rows", "group"])
def test_a_step_has_the_same_loss_both_ways(small: None, what: str, model: str):
    ragged, padded = (child.PARTS[what]({"what": what, "model": model, "ragged": r, "times": 1}) for r in (True, False))
    assert ragged["loss"] == pytest.approx(padded["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", TARGETS["rollouts"])
def test_both_write_as_many_tokens(small: None, model: str):
    found = [child.PARTS["rollouts"]({"model": model, "ragged": r, "times": 1})["tokens"] for r in (True, False)]
    assert found[0] == found[1] > 0


def test_the_section_has_a_line_for_each_model():
    run: dict[str, Any] = {"seconds": [2.0, 1.0], "above_start_bytes": 5e8}
    models = {name: {"ragged": run, "padded": run, "speed": 1.0, "target": 2.0} for name in TARGETS["rows"]}
    hardware = {"cpu": "a CPU", "threads": 2, "memory_gb": 1, "system": "Linux"}
    versions = dict.fromkeys(("date", "lowtide", "lowtide_commit", "torch", "transformers", "trl"), "1")
    given = {"measured": {"rows": {"models": models}}, "hardware": hardware, "versions": versions}
    lines = recurrent_section(given).splitlines()
    assert sum(line.startswith("| a step of 16 rows") and "**1.00x**" in line for line in lines) == len(models)
