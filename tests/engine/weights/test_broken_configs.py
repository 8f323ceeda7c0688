"""A model's folder whose JSON files hold other kinds of values than they should is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.demo.model import save
from lowtide.engine.weights.loading import load_model, load_tokenizer

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "text for a size": ({"hidden_size": "64"}, "config of model .* cannot be read: .*hidden_size"),
    "no layers": ({"num_hidden_layers": 0}, "config of model .* cannot be read"),
    "a list for a type": ({"model_type": ["llama"]}, "config of model .* cannot be read"),
    "text for a token": ({"eos_token_id": ["a"]}, "config of model .* cannot be read: .*eos_token_id"),
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError.*Look at its config.json"),
    "an unknown activation": ({"hidden_act": "none"}, "KeyError: 'none'. Look at its config.json"),
    "a vocabulary below 0": ({"vocab_size": -1}, "RuntimeError.*Look at its config.json"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "model", seed=0)
    return tmp_path / "model"


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_describes_no_model_is_refused(folder, case):
    changes, said = WRONG[case]
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=said):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{}"), ("tokenizer.json", "null"), ("tokenizer_config.json", "[1]")]
)
def test_a_tokenizer_of_other_kinds_is_refused(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=r"no tokenizer at .*\((KeyError|AttributeError): "):
        load_tokenizer(str(folder))
