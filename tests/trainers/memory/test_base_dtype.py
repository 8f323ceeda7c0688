"""Frozen weights in fewer bits (`base_dtype`): what is stored and computed, beside plain layers that hold the rounded
weights; what is refused."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors import safe_open

from lowtide import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.engine.weights.loading import adapt
from lowtide.engine.weights.merging import save_merged
from lowtide.engine.weights.quantized import dense_weight, is_quantized
from lowtide.ops.layers.float8 import FORMAT, in_rows, stored
from lowtide.run.base_dtype import store_base
from tests.support.models.adapted_models import moe
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.distilling import losses

ROWS = [{"text": f"{one} + {one + 3} = {2 * one + 3}"} for one in range(16)]
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def config(tmp_path, **options):
    given = {
        "output_dir": str(tmp_path), "max_steps": 3, "learning_rate": 5e-3, "report_to": [], "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "per_device_train_batch_size": 4, **options,
    }  # fmt: skip
    return SFTConfig(**given)


def trainer(tmp_path, model=None, peft=None, **options):
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    return SFTTrainer(
        model=make_model(tokenizer, seed=0) if model is None else model,
        args=config(tmp_path, **options),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA) if peft is None else peft,
    )


def adapters(made) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in made.model.named_parameters() if p.requires_grad}


def rounded_model() -> Any:
    """The demo's model whose layers hold what FP8 rounds their weights to."""
    model: Any = make_model(make_tokenizer(), seed=0)
    for layer in model.model.layers.modules():
        if type(layer) is torch.nn.Linear:
            layer.weight.data = in_rows(layer.weight.data).dense(torch.float32)
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_in_float32_a_run_is_that_of_the_rounded_weights(tmp_path, fused, checkpointing):
    options = {"gradient_checkpointing": checkpointing}
    expected = trainer(tmp_path, rounded_model(), **options)
    expected.train()
    found = trainer(tmp_path, base_dtype="float8", fused_layers=fused, **options)
    layers = [module for module in found.model.modules() if stored(module) is not None]
    assert len(layers) == 2 * 7
    assert all(stored(layer).codes.dtype == FORMAT and not layer.weight.requires_grad for layer in layers)
    found.train()
    assert torch.allclose(losses(found), losses(expected), atol=1e-5)
    for name, value in adapters(found).items():
        assert torch.allclose(value, adapters(expected)[name], atol=1e-4)


def test_in_bfloat16_products_are_in_8_bits(tmp_path):
    plain = trainer(tmp_path, rounded_model(), bf16=True)
    plain.train()
    apart = trainer(tmp_path, base_dtype="float8", bf16=True)
    apart.train()
    assert not torch.allclose(losses(apart), losses(plain), atol=1e-5)
    assert torch.allclose(losses(apart), losses(plain), atol=0.05)


def test_half_of_the_bytes_are_left(tmp_path):
    model = make_model(make_tokenizer(), seed=0).bfloat16()
    before = {name: p.nbytes for name, p in model.named_parameters()}
    made = trainer(tmp_path, copy.deepcopy(model), base_dtype="float8")
    frozen = {name: p for name, p in made.model.named_parameters() if not p.requires_grad}
    in_layers = {name: p for name, p in frozen.items() if ".layers." in name and p.dim() == 2}
    assert all(is_quantized(p) for p in in_layers.values())
    plain = sum(size for name, size in before.items() if ".layers." in name and name.endswith("proj.weight"))
    assert sum(p.nbytes for p in in_layers.values()) * 2 == plain
    assert not any(is_quantized(p) for name, p in frozen.items() if "embed" in name or "lm_head" in name)


def test_what_is_saved_is_pefts_and_a_merge_has_the_values_that_were_trained_on(tmp_path):
    made = trainer(tmp_path, base_dtype="float8")
    made.train()
    made.save_model(str(tmp_path / "adapter"))
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["r"] == LORA["r"]
    save_merged(made.model, tmp_path / "merged")
    name = "model.layers.0.self_attn.q_proj"
    layer: Any = made.model.get_submodule(f"base_model.model.{name}")
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        found = file.get_tensor(f"{name}.weight")
    expected = dense_weight(layer.base_layer, torch.float32) + change
    assert torch.allclose(found.float(), expected, atol=1e-6)


@pytest.mark.slow
def test_resumed_as_if_it_had_not_stopped(tmp_path):
    whole = trainer(tmp_path / "whole", base_dtype="float8", bf16=True, max_steps=4)
    whole.train()
    first = trainer(tmp_path / "run", base_dtype="float8", bf16=True, max_steps=4, save_strategy="steps", save_steps=2)
    first.train()
    again = trainer(tmp_path / "run", base_dtype="float8", bf16=True, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, value in adapters(whole).items():
        assert torch.equal(value, adapters(again)[name])


def test_the_model_without_its_adapters_is_the_reference(tmp_path):
    rows = [{"prompt": f"{one} + 1 =", "chosen": f" {one + 1}", "rejected": " 0"} for one in range(8)]
    tokenizer = make_tokenizer()
    made = DPOTrainer(
        model=make_model(tokenizer, seed=0),
        args=DPOConfig(output_dir=str(tmp_path), max_steps=1, report_to=[], base_dtype="float8", logging_steps=1),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA),
    )
    made.train()
    assert losses(made).item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float8", "nvfp4"])
def test_a_run_falls_in_loss(tmp_path, dtype):
    if dtype == "nvfp4":
        pytest.importorskip("torchao")
    made = trainer(tmp_path, base_dtype=dtype, max_steps=12)
    made.train()
    assert losses(made)[-1] < losses(made)[0] - 0.1
    plain: Any = make_model(make_tokenizer(), seed=0)
    adapted: Any = made.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    layer = adapted.base_layer
    exact = plain.model.layers[0].mlp.up_proj.weight.detach()
    off = float((dense_weight(layer, torch.float32) - exact).norm() / exact.norm())
    assert 0.5 < off / {"float8": 0.026, "nvfp4": 0.1}[dtype] < 1.2  # as the table of techniques says


FORMS = ("float8", "nvfp4")


def rank_main(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for form in FORMS:
            made = trainer(place / form / str(rank), base_dtype=form, per_device_train_batch_size=2)
            made.train()
            if rank == 0:
                torch.save(adapters(made), place / f"{form}.pt")
        with pytest.raises(ValueError, match=r"fsdp cannot shard the weight .* in torchao's form"):
            trainer(place / "cut" / str(rank), base_dtype="nvfp4", fsdp="full_shard")


@pytest.mark.slow
def test_two_ranks_train_what_one_does(tmp_path):
    pytest.importorskip("torchao")
    run_ranks(rank_main, str(meeting_place(tmp_path)))
    for form in FORMS:
        alone = trainer(tmp_path / form, base_dtype=form)
        alone.train()
        for name, value in torch.load(tmp_path / f"{form}.pt").items():
            assert torch.allclose(value, adapters(alone)[name], atol=1e-4)


def test_refused(tmp_path):
    with pytest.raises(ValueError, match="set use_peft=True"):
        SFTTrainer(
            model=make_model(make_tokenizer(), seed=0),
            args=config(tmp_path, base_dtype="float8"),
            train_dataset=Dataset.from_list(ROWS),
            processing_class=make_tokenizer(),
        )
    with pytest.raises(ValueError, match="DoraLinearVariant reads the weight itself: take plain LoRA"):
        trainer(tmp_path, peft=LoraConfig(**LORA, use_dora=True), base_dtype="float8")
    with pytest.raises(ValueError, match="base_dtype='float16'"):
        config(tmp_path, base_dtype="float16")


@pytest.mark.parametrize(("kind", "told"), [("float8", False), ("nvfp4", True)])
def test_experts_that_are_left_whole_are_told(kind: str, told: bool, caplog: pytest.LogCaptureFixture):
    if kind == "nvfp4":
        pytest.importorskip("torchao")
    model = adapt(moe(), LoraConfig(r=2, target_modules=["q_proj"]), gradient_checkpointing=False)
    store_base(model, SimpleNamespace(base_dtype=kind, device=torch.device("cpu")))
    assert any(map(is_quantized, model.parameters()))
    assert ("routed experts are not quantized: experts.down_proj, experts.gate_up_proj" in caplog.text) == told
