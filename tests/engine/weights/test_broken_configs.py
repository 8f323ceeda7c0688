"""A model's folder whose JSON files hold other kinds of values than they should is refused in a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowtide.demo.model import save
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.engine.weights.places import DTYPES

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "text for a size": ({"hidden_size": "64"}, "config of .* says hidden_size='64'"),
    "no layers": ({"num_hidden_layers": 0}, "config of model .* cannot be read"),
    "a list for a type": ({"model_type": ["llama"]}, "config of model .* cannot be read"),
    "text for a token": ({"eos_token_id": ["a"]}, "config of model .* cannot be read: .*eos_token_id"),
    "no heads": ({"num_attention_heads": 0}, "says num_attention_heads=0, and a model has 1 to"),
    "true for a count": ({"num_hidden_layers": True}, "says num_hidden_layers=True"),
    "a list for a size": ({"hidden_size": [64]}, r"says hidden_size=\[64\], which is one number"),
    "an unknown dtype": ({"dtype": "floaty"}, "says dtype='floaty', which names nothing that weights are stored in"),
    "an unknown dtype of old": ({"torch_dtype": "floaty"}, "says torch_dtype='floaty'"),
    "an unknown type": ({"model_type": "lama"}, "is of model_type 'lama', which transformers .*; did you mean 'llama'"),
    "an unknown quantization": (
        {"quantization_config": {"quant_method": "magic"}},
        "quant_method='magic', which trans",
    ),
    "a list for a quantization": ({"quantization_config": [4]}, "no object with a quant_method"),
    "a vocabulary of a trillion": ({"vocab_size": 10**12}, "says vocab_size=1000000000000"),
    "layers of a part": ({"text_config": {"num_layers": 10**9}}, "says num_layers=1000000000"),
    "no number": ({"hidden_size": float("nan")}, "says hidden_size=nan"),
    "an unknown activation": ({"hidden_act": "none"}, "KeyError: 'none'. Look at its config.json"),
    "a vocabulary below 0": ({"vocab_size": -1}, "config of .* says vocab_size=-1, and a model has 0 to"),
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


@pytest.mark.parametrize("content", [b"[]", "{}".encode("utf-16"), bytes(range(256)), b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused_before_the_tokenizer(folder, content):
    (folder / "config.json").write_bytes(content)
    for read in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=r"config of model .* cannot be read: its config.json"):
            read(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_pipe_or_device_in_a_file_s_place_is_refused(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for read in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=rf"cannot be loaded: {name} is neither a file nor a folder"):
            read(str(folder))
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"cannot be loaded: {name} is neither a file nor a folder"):
        load_model(str(folder))


def test_weights_stored_as_whole_numbers_are_refused(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file({**weights, name: weights[name].to(torch.int8)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} .*stored as whole numbers"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{}"), ("tokenizer.json", "null"), ("tokenizer_config.json", "[1]")]
)
def test_a_tokenizer_of_other_kinds_is_refused(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=r"no tokenizer at .*\((KeyError|AttributeError): "):
        load_tokenizer(str(folder))


def test_every_dtype_of_weights_is_known():
    floats = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
    assert [str(dtype) for dtype in floats if not DTYPES.fullmatch(str(dtype).removeprefix("torch."))] == []
