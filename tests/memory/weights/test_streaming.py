"""Frozen weights that stay in their files: the same values and gradients, and what is refused."""

import copy
import importlib
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from lowtide import SFTConfig
from lowtide.compat.torch import parts_of
from lowtide.engine.forward import causal_model
from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.weights.streaming import stream_of
from lowtide.ops import mapped
from lowtide.run import streamed_weights
from lowtide.run.streamed_weights import check_before_loading, loaded_on_host, stream_frozen
from lowtide.trainers.reports.start import StartReport
from tests.support.marks import slow_but
from tests.support.models.tiny_models import build
from tests.support.runs.streamed_runs import (
    LORA,
    WRITTEN,
    assert_all_resumes,
    assert_like,
    assert_resumes,
    dpo,
    outcome,
    saved,
    sft,
)


@pytest.fixture(autouse=True)
def _small_bands(monkeypatch):
    monkeypatch.setattr(mapped, "BAND_BYTES", 4096)


def mapped_bytes(model) -> int:
    """Resident bytes of the streamed weights of a model, by the system's map of pages."""
    import mmap

    import numpy as np

    total = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for weight in stream_of(model).weights:
            first = -(-weight.data_ptr() // mmap.PAGESIZE)
            file.seek(8 * first)
            pages = max((weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE - first, 0)
            flags = np.frombuffer(file.read(8 * pages), dtype=np.uint64)
            total += int((flags >> np.uint64(63)).sum()) * mmap.PAGESIZE
    return total


@pytest.mark.parametrize(
    "checkpointing", slow_but([None], [None, {"use_reentrant": False}, {"use_reentrant": True}]), ids=str
)
@pytest.mark.parametrize("tied", slow_but([False], [False, True]))
def test_lora_over_a_streamed_base_takes_the_steps_of_a_resident_one(tmp_path, tied, checkpointing):
    build(vocab_size=400, tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    name = str(tmp_path / "model")
    options = {"gradient_checkpointing": checkpointing is not None, "gradient_checkpointing_kwargs": checkpointing}
    wanted = outcome(sft(name, tmp_path / "out", **options))
    trainer = sft(name, tmp_path / "out", base_weights="stream", **options)
    assert_like(outcome(trainer), wanted)
    stream = stream_of(trainer.model)
    base = {id(p) for p in trainer.model.parameters() if not p.requires_grad}
    assert {id(weight) for weight in stream.weights} == base
    stream.let_all_go()
    assert mapped_bytes(trainer.model) == 0


@pytest.mark.slow
def test_layers_come_and_go(tmp_path):
    """One layer is resident at a time, forward, recomputed and backward."""
    name = saved(tmp_path / "model", num_hidden_layers=4, hidden_size=256, intermediate_size=1024)
    trainer = sft(name, tmp_path / "out", base_weights="stream", gradient_checkpointing=True)
    stream = stream_of(trainer.model)
    layers = [unit for unit in stream.units if unit.is_layer]
    assert len(layers) == 4
    present = []
    bring = stream.store.bring

    def seen(unit, following):
        bring(unit, following)
        present.append((unit, mapped_bytes(trainer.model)))

    stream.store.bring = seen
    outcome(trainer)
    order = [layers.index(unit) for unit, _ in present if unit.is_layer]
    assert [number for number, _ in itertools.groupby(order)][-7:] == [0, 1, 2, 3, 2, 1, 0]
    most = max(size for _, size in present)
    assert 0.9 * layers[0].bytes <= most < 1.6 * layers[0].bytes


@pytest.mark.slow
def test_a_reference_of_its_own_is_streamed(tmp_path):
    name = saved(tmp_path / "model")
    wanted = outcome(dpo(name, tmp_path / "out", ref_model=name))
    trainer = dpo(name, tmp_path / "out", ref_model=name, base_weights="stream")
    assert_like(outcome(trainer), wanted)
    assert stream_of(trainer.reference.model).bytes == sum(p.nbytes for p in trainer.reference.model.parameters())


@pytest.mark.slow
def test_a_copy_of_a_policy_that_is_trained_whole_is_taken_from_its_files(tmp_path):
    name = saved(tmp_path / "model")
    wanted = outcome(dpo(name, tmp_path / "out", peft=None, fused_layers=False))
    trainer = dpo(name, tmp_path / "out", peft=None, base_weights="stream")
    assert_like(outcome(trainer), wanted)
    assert stream_of(trainer.model) is None
    assert stream_of(trainer.reference.model) is not None


QUANTIZATIONS = {
    "4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32"),
    "4 bits, scales quantized": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao": lambda: TorchAoConfig(importlib.import_module("torchao.quantization").Int8WeightOnlyConfig()),
}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_base_is_streamed(tmp_path, quantization):
    """Codes and scales wait in a temporary file, and so does what is not quantized. By SGD, since AdamW makes steps of
    gradients that are rounding alone."""
    pytest.importorskip("torchao" if quantization == "torchao" else "bitsandbytes")
    name = saved(tmp_path / "model", hidden_size=128, intermediate_size=256)
    options = {"model_init_kwargs": {"quantization_config": QUANTIZATIONS[quantization]()}, "optim": "sgd"}
    wanted = outcome(sft(name, tmp_path / "out", **options))
    trainer = sft(name, tmp_path / "out", base_weights="stream", gradient_checkpointing=True, **options)
    assert_like(outcome(trainer), wanted)
    stream = stream_of(trainer.model)
    base = [p for p in trainer.model.parameters() if not p.requires_grad]
    assert stream.bytes >= sum(part.nbytes for p in base for part in parts_of(p))
    assert all(mapped.is_mapped(weight) for weight in stream.weights)
    stream.let_all_go()
    assert mapped_bytes(trainer.model) == 0


@pytest.mark.slow
def test_a_quantized_base_leaves_no_other_copy_of_itself(tmp_path):
    """Resumed and evaluated, all of it is still in the file."""
    pytest.importorskip("bitsandbytes")
    name = saved(tmp_path / "model", hidden_size=128, intermediate_size=256)
    quantized = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    assert_resumes(name, tmp_path / "out", base_weights="stream", model_init_kwargs=quantized)
    trainer = sft(name, tmp_path / "out", base_weights="stream", model_init_kwargs=quantized)
    for module in trainer.model.modules():
        if getattr(getattr(module, "weight", None), "CB", None) is not None:
            assert module.weight.CB.data_ptr() == module.weight.data_ptr()
            assert mapped.is_mapped(module.weight)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0


@pytest.mark.slow
def test_a_quantized_reference_is_streamed(tmp_path):
    pytest.importorskip("bitsandbytes")
    name = saved(tmp_path / "model", hidden_size=128, intermediate_size=256)
    quantized = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32")}
    options = {"ref_model": name, "model_init_kwargs": quantized, "optim": "sgd"}  # as above
    wanted = outcome(dpo(name, tmp_path / "out", **options))
    trainer = dpo(name, tmp_path / "out", base_weights="stream", **options)
    assert_like(outcome(trainer), wanted)
    for model in (trainer.model, trainer.reference.model):
        assert stream_of(model) is not None


def test_weights_of_torchao_are_not_brought_to_a_gpu():
    pytest.importorskip("torchao")
    args = SimpleNamespace(base_weights="stream", device=torch.device("cuda"))
    with pytest.raises(ValueError, match="brings bitsandbytes' weights to a GPU, and these are in torchao's form"):
        check_before_loading("model", args, {"quantization_config": QUANTIZATIONS["torchao"]()}, frozen=True)


def test_beside_a_gpu_only_layers_are_held_to_the_dtype_of_the_computation():
    """Embedding and head stay there as they are."""
    args = SimpleNamespace(base_weights="stream", device=torch.device("cuda"), bf16=True, fp16=False)
    model = build(num_hidden_layers=2)
    with pytest.raises(ValueError, match="each weight of model, stored in float32, would be a resident copy"):
        stream_frozen(model.requires_grad_(False), args)
    model.model.layers.to(torch.bfloat16)
    with mock.patch.object(streamed_weights, "PinnedLayers", side_effect=Reached), pytest.raises(Reached):
        stream_frozen(model, args)


class Reached(Exception):
    """What comes after all checks."""


def test_what_is_streamed_to_a_gpu_is_quantized_on_the_host():
    args = SimpleNamespace(base_weights="stream", device=torch.device("cuda"))
    asked = {"quantization_config": object(), "device_map": {"": 0}}
    assert loaded_on_host(asked, args)["device_map"] == {"": "cpu"}
    resident = SimpleNamespace(base_weights="resident", device=torch.device("cuda"))
    assert loaded_on_host(asked, resident) == asked


def test_the_report_says_what_waits(tmp_path):
    """And its bar has what is resident."""
    trainer = sft(saved(tmp_path / "model"), tmp_path / "out", base_weights="stream")
    report = next(each for each in trainer.callback_handler.callbacks if isinstance(each, StartReport))
    stream = stream_of(trainer.model)
    lines = dict(report.lines())
    assert lines["streamed weights"].startswith(f"{bytes_text(stream.bytes)} wait in files")
    resident = report.states.weights - stream.bytes + stream.largest
    assert 0 < resident < report.states.weights
    assert f"weights {bytes_text(resident)}" in report.bar().plain.split("\n")[1]


@pytest.mark.slow
def test_a_run_that_is_resumed_gives_the_same_bits(tmp_path):
    name = saved(tmp_path / "model")
    assert_resumes(name, tmp_path / "out", base_weights="stream")


@pytest.mark.slow
def test_in_bfloat16(tmp_path):
    """By SGD, as above."""
    name = saved(tmp_path / "model", torch.bfloat16)
    options = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "sgd"}
    wanted = outcome(sft(name, tmp_path / "out", **options))
    got = outcome(sft(name, tmp_path / "out", **options, base_weights="stream"))
    assert_like(got, wanted, 2e-3)


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(match, make, *args, **options):
    with pytest.raises(ValueError, match=match):
        make(*args, base_weights="stream", **options)


def test_what_cannot_be_streamed_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    name, out = saved(tmp_path / "model"), tmp_path / "out"
    monkeypatch.setattr("lowtide.run.training_run.load_inputs", lambda *_, **__: pytest.fail("it was loaded"))
    refused("trains all of them", sft, name, out, peft=None)
    refused("set dtype='float32'", sft, name, out, model_init_kwargs={"dtype": "bfloat16"})
    whole = (tmp_path / "model" / "model.safetensors").read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(whole[:-100])
    refused("truncated", sft, name, out)
    (tmp_path / "model" / "model.safetensors").unlink()
    refused("not on disk as safetensors", sft, name, out)


def test_a_missing_shard_is_named(tmp_path):
    build(vocab_size=400).save_pretrained(tmp_path / "model", max_shard_size="50KB")
    gone = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    gone.unlink()
    refused(f"{gone.name} is not there", sft, str(tmp_path / "model"), tmp_path / "out")


def test_weights_in_memory_are_refused(tmp_path):
    refused("does not lie in a file", sft, build(), tmp_path / "out")


def test_a_loaded_model_whose_weights_are_mapped_is_streamed(tmp_path):
    model = type(build()).from_pretrained(saved(tmp_path / "model"))
    trainer = sft(model, tmp_path / "out", base_weights="stream")
    assert stream_of(trainer.model) is not None


def test_adapters_that_change_the_base_are_refused(tmp_path):
    refused(
        "init_lora_weights",
        sft,
        saved(tmp_path / "model"),
        tmp_path / "out",
        peft={**LORA, "init_lora_weights": "pissa"},
    )


def test_mixed_precision_would_copy_each_weight(tmp_path):
    refused("bf16=False", sft, saved(tmp_path / "model"), tmp_path / "out", bf16=True)


def test_compiled_layers_are_refused(tmp_path):
    refused("torch_compile", sft, saved(tmp_path / "model"), tmp_path / "out", torch_compile=True)


def test_a_reference_that_moves_or_is_stored_otherwise_is_refused(tmp_path):
    name, out = saved(tmp_path / "model"), tmp_path / "out"
    refused("sync_ref_model=True", dpo, name, out, ref_model=name, sync_ref_model=True)
    refused("ref_model_storage='8bit'", dpo, name, out, ref_model=name, ref_model_storage="8bit")
    loaded = type(build()).from_pretrained(name)
    refused("passed loaded", dpo, loaded, out, peft=None)


@pytest.mark.slow
def test_a_weight_that_is_changed_in_place_stays(tmp_path, caplog):
    """Its pages are the process's own then, and would be lost."""
    name = saved(tmp_path / "model")
    found = []
    for options in ({}, {"base_weights": "stream"}):
        trainer = sft(name, tmp_path / "out", **options)
        inner = causal_model(trainer.model)
        for weight in (inner.model.layers[0].mlp.down_proj.base_layer.weight, inner.lm_head.weight):
            weight.data.mul_(2)
        found.append(outcome(trainer))
    assert_like(found[1], found[0])
    assert "was changed in place" in caplog.text


def test_merging_after_training(tmp_path):
    trainer = sft(saved(tmp_path / "model"), tmp_path / "out", base_weights="stream")
    outcome(trainer)
    adapted = copy.deepcopy(trainer.model)
    ids = torch.arange(1, 9)[None]
    wanted = adapted(input_ids=ids).logits
    merged = trainer.model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


def test_what_was_not_declared_is_never_let_go():
    weight = torch.nn.Parameter(torch.ones(1000, 10))
    mapped.let_go(weight)
    assert weight.sum() == 10_000
    assert not mapped.is_mapped(weight)
    assert [*mapped.bands(weight)] == [slice(0, 1000)]


# -- trained weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", slow_but([False], [False, True]))
@pytest.mark.parametrize("optim", slow_but(["sgd"], ["adamw_torch_fused", "adamw_torch", "sgd"]))
def test_all_weights_in_a_file_take_the_steps_of_resident_ones(tmp_path, tied, optim):
    build(vocab_size=400, tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    name, options = str(tmp_path / "model"), {"optim": optim, "learning_rate": 2e-3, "weight_decay": 0.1}
    wanted = outcome(sft(name, tmp_path / "out", peft=None, max_grad_norm=0.1, **options))
    trainer = sft(name, tmp_path / "out", peft=None, **WRITTEN, **options)
    assert_like(outcome(trainer), wanted)
    stream = stream_of(trainer.model)
    assert {id(weight) for weight in stream.weights} == {id(p) for p in trainer.model.parameters()}
    states = trainer.optimizer.optimizer.state.values()
    large = [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
    assert all(mapped.is_mapped(value) for value in large)
    assert bool(large) == (optim != "sgd")


@pytest.mark.slow
def test_all_weights_in_a_file_resumed_to_the_same_bits(tmp_path):
    assert_all_resumes(tmp_path)


@pytest.mark.slow
def test_several_micro_batches_are_stepped_by_rows_too(tmp_path):
    name = saved(tmp_path / "model")
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    wanted = outcome(sft(name, tmp_path / "out", peft=None, max_grad_norm=0.1, **options))
    assert_like(outcome(sft(name, tmp_path / "out", peft=None, **WRITTEN, **options)), wanted)


def test_what_trained_weights_in_a_file_do_not_go_with(tmp_path):
    name, out = saved(tmp_path / "model"), tmp_path / "out"
    with pytest.raises(ValueError, match="optimizer_in_backward='two_pass'"):
        SFTConfig(output_dir=str(out), trained_weights="stream")
    with pytest.raises(ValueError, match="base_weights='stream'"):
        sft(name, out, **WRITTEN)
    with pytest.raises(ValueError, match="number by number"):
        sft(name, out, peft=None, **WRITTEN, optim="adafactor")
