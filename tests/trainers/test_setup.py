"""A model is proved where it will run, in a precision that can train it."""

from types import SimpleNamespace

import pytest
import torch
from exactness.matrix import build

from lowtide.trainers import setup
from lowtide.trainers.setup import install_engine


@pytest.mark.parametrize("said", [None, True, False])
def test_a_model_is_placed_before_it_is_proved(said, monkeypatch):
    """None is what the arguments of transformers say where nobody says anything."""
    seen = []
    monkeypatch.setattr(setup, "release_file", lambda model: None)
    monkeypatch.setattr(setup, "settle_heap", lambda model: seen.append(model.device.type))
    monkeypatch.setattr(setup, "probe", lambda model: seen.append(model.device.type) or SimpleNamespace(isolated=True))
    args = SimpleNamespace(place_model_on_device=said, device=torch.device("meta"), padding_free=True)
    setup._proved(build("SFT", 64), args)
    assert seen == (["cpu", "cpu"] if said is False else ["meta", "meta"])


@pytest.mark.parametrize(("dtype", "optim"), [("bfloat16", "adamw_torch"), ("float32", "adamw_compressed")])
def test_gradients_in_bfloat16_are_not_scaled_for_float16(dtype, optim):
    model = build("SFT", 64).to(getattr(torch, dtype))
    args = SimpleNamespace(fp16=True, bf16=False, device=torch.device("cuda"), optim=optim)
    with pytest.raises(ValueError, match=r"fp16=True scales its losses, and gradients in bfloat16 \(.*take bf16=True"):
        install_engine(model, args)
