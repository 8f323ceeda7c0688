"""A model is proved where it will run, in a precision that can train it."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.engine import forward
from lowtide.ranks.sharding import Sharding
from lowtide.run import engine as setup
from lowtide.run.engine import install_engine
from tests.support.matrix.matrix import build
from tests.support.models.architectures import build as architecture
from tests.support.references.installed_kernels import on_a_gpu, put_in_place  # noqa: F401


def arguments(**given) -> Any:
    """Of a run without padding in float32, as far as an engine reads them."""
    usual = {"padding_free": True, "fp16": False, "bf16": False, "optim": "adamw_torch", "asked_attention": None}
    return SimpleNamespace(**{**usual, "sharding": Sharding(), **given})


@pytest.mark.parametrize("said", [None, True, False])
def test_a_model_is_placed_before_it_is_proved(said, monkeypatch):
    """None is what the arguments of transformers say where nobody says anything."""
    seen = []
    monkeypatch.setattr(setup, "release_file", lambda model: None)
    monkeypatch.setattr(setup, "settle_heap", lambda model, **_: seen.append(model.device.type))
    found = SimpleNamespace(isolated=True)
    monkeypatch.setattr(setup, "probe", lambda model, ragged: seen.append(model.device.type) or found)
    args = arguments(place_model_on_device=said, device=torch.device("meta"))
    install_engine(build("SFT", 64), args)
    assert seen == (["cpu", "cpu"] if said is False else ["meta", "meta"])


@pytest.mark.parametrize(("dtype", "optim"), [("bfloat16", "adamw_torch"), ("float32", "adamw_compressed")])
def test_gradients_in_bfloat16_are_not_scaled_for_float16(dtype, optim):
    model = build("SFT", 64).to(getattr(torch, dtype))
    args = arguments(fp16=True, device=torch.device("cuda"), optim=optim)
    with pytest.raises(ValueError, match=r"fp16=True scales its losses, and gradients in bfloat16 \(.*take bf16=True"):
        install_engine(model, args)


def run_padded_or_raise(monkeypatch, error: Exception) -> setup.Engine:
    """What is made of a model whose ragged forward raises."""

    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr(forward, "ragged_inputs", failing)
    args = arguments(place_model_on_device=False, device=torch.device("cpu"))
    return install_engine(build("SFT", 64), args)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError("std::bad_alloc"),
    ],
)
def test_memory_that_runs_out_in_the_probe_is_no_word_on_the_model(error, monkeypatch):
    with pytest.raises(type(error), match=re.escape(str(error))):
        run_padded_or_raise(monkeypatch, error)


def test_another_failure_of_the_ragged_forward_is_named(monkeypatch, caplog):
    engine = run_padded_or_raise(monkeypatch, RuntimeError("shape '[3, 4]' is invalid\nand more lines"))
    assert not engine.padding_free
    assert engine.reason == (
        "model type llama cannot run segments that are laid end to end (RuntimeError: shape '[3, 4]' is invalid)"
    )
    assert f"running padded: {engine.reason}" in caplog.text


@pytest.mark.usefixtures("on_a_gpu")
def test_a_run_says_which_kernels_compute_recurrent_layers(monkeypatch):
    args = arguments(place_model_on_device=False, device=torch.device("cuda"))
    model = architecture("qwen3_5").bfloat16()
    rule = "chunk_gated_delta_rule of flash-linear-attention"
    convolution = "causal_conv1d_fn of causal-conv1d"
    missing = f"torch in the place of {convolution}, which is not installed"
    assert install_engine(model, args).mixing == f"{missing}; torch in the place of {rule}, which is not installed"
    put_in_place(monkeypatch)
    monkeypatch.setattr("lowtide.ops.installed_kernels._found", {})
    assert install_engine(model, args).mixing == f"{convolution}, proved; {rule}, proved"
    assert install_engine(model.float(), args).mixing.endswith("takes 16 bits, where these layers compute in float32")
    assert install_engine(build("SFT", 64), args).mixing == ""
    args.device = torch.device("cpu")
    assert install_engine(model, args).mixing == ""
