"""Quantized layers in pinned host memory: the numbers of resident ones, a lower peak, and nothing made on the GPU."""

import gc

import pytest
import torch
from transformers import BitsAndBytesConfig

from lowtide.memory.weights.pinned_layers import PinnedLayers
from lowtide.memory.weights.streaming import stream_of
from tests.support.runs.streamed_runs import assert_like, assert_resumes, dpo, outcome, saved, sft

ON_CUDA = {"use_cpu": False, "bf16": False, "tf32": False, "optim": "sgd"}
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
QUANTIZATIONS = {
    "4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32"),
    "4 bits, scales quantized": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_base_is_streamed(tmp_path, quantization, checkpointing):
    pytest.importorskip("bitsandbytes")
    name = saved(tmp_path / "model", **WIDE)
    options = {**ON_CUDA, "gradient_checkpointing": checkpointing}
    options["model_init_kwargs"] = {"quantization_config": QUANTIZATIONS[quantization]()}
    wanted = outcome(sft(name, tmp_path / "out", **options))
    gc.collect()
    trainer = sft(name, tmp_path / "out", base_weights="stream", **options)
    stream = stream_of(trainer.model)
    assert isinstance(stream.store, PinnedLayers)
    assert all(weight.is_pinned() for weight in stream.weights)
    assert_like(outcome(trainer), wanted, 2e-3)


def test_what_is_streamed_is_never_all_there(tmp_path, peak_above_start):
    pytest.importorskip("bitsandbytes")
    name = saved(tmp_path / "model", **WIDE | {"num_hidden_layers": 24})
    options = {**ON_CUDA, "model_init_kwargs": {"quantization_config": QUANTIZATIONS["4 bits"]()}}
    found = {}
    for where in ("resident", "stream"):
        gc.collect()
        found[where] = peak_above_start(lambda where=where: outcome(sft(name, tmp_path, base_weights=where, **options)))
    codes = 24 * (4 * 512 * 512 + 3 * 512 * 2048) // 2  # of the layers, in bytes
    assert found["stream"] < found["resident"] - 0.7 * codes


def test_a_run_that_is_resumed_gives_the_same_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    options = {**ON_CUDA, "model_init_kwargs": {"quantization_config": QUANTIZATIONS["4 bits"]()}}
    assert_resumes(saved(tmp_path / "model"), tmp_path / "out", base_weights="stream", **options)


@pytest.mark.parametrize("storage", ["cpu", "8bit", "4bit"])
def test_a_reference_that_is_stored_otherwise(tmp_path, storage):
    pytest.importorskip({"cpu": "torch", "8bit": "torchao", "4bit": "bitsandbytes"}[storage])
    name = saved(tmp_path / "model", hidden_size=256, intermediate_size=512)
    wanted = outcome(dpo(name, tmp_path / "out", peft=None, **ON_CUDA))
    torch.cuda.empty_cache()
    got = outcome(dpo(name, tmp_path / "out", peft=None, ref_model_storage=storage, **ON_CUDA))
    assert_like(got, wanted, {"cpu": 1e-4, "8bit": 2e-2, "4bit": 2e-1}[storage])
