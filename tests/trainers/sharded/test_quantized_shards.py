"""Weights in 4 bits and in FP8 that are cut into shards, those of linear layers and of stacks of experts, and FP8 with
tp_size and ZeRO-3: two ranks train what one does."""

from __future__ import annotations

import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig

from lowtide import SFTConfig, SFTTrainer
from lowtide.compat.deepspeed import is_partitioned
from lowtide.demo.model import make_tokenizer
from lowtide.engine.weights.quantized import check_sendable, is_quantized, put_in_float8, put_in_nvfp4
from lowtide.engine.weights.sharded.split_layers import split_layers
from tests.support.models.tiny_models import build
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.distilling import losses

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
ROWS = [{"text": f"{one} + {one + 3} = {2 * one + 3}"} for one in range(16)]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
STORED: dict[str, dict[str, Any]] = {
    "4 bits": {
        "model_init_kwargs": {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            )
        }
    },
    "FP8": {"base_dtype": "float8"},
    "FP8, fused": {"base_dtype": "float8", "fused_layers": True},
}
CASES = [(kind, stored) for kind in KINDS for stored in STORED]
SPREAD: dict[str, dict[str, Any]] = {
    "tp_size": {"parallelism_config": {"tp_size": 2}},
    "ZeRO-3": {"deepspeed": {"zero_optimization": {"stage": 3}}, "per_device_train_batch_size": 2},
}
UNBALANCED: dict[str, Any] = {"qwen3_moe": {"router_aux_loss_coef": 0.0}}
"""The loss that balances experts is that of a forward: those of two ranks are not the one of a forward of all rows."""
ADAPTED: dict[str, Any] = {"llama": "all-linear", "qwen3_moe": ["q_proj", "o_proj"]}
"""What is, where experts are not: tp_size splits none of their adapters."""


def trainer(folder: Path, kind: str, stored: str, adapted: Any = "all-linear-experts", **options: Any) -> Any:
    args = SFTConfig(
        **{
            "output_dir": str(folder / "run"), "max_steps": 3, "learning_rate": 5e-3, "report_to": [],
            "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "per_device_train_batch_size": 4,
            **STORED[stored], **options,
        }
    )  # fmt: skip
    return SFTTrainer(
        model=str(folder / kind),
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=adapted),
    )


def rank_main(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for kind, stored in CASES:
            made = trainer(place, kind, stored, per_device_train_batch_size=2, fsdp=True)
            for layer in made.model.modules():
                if isinstance(layer, nn.Linear) and is_quantized(layer.weight):
                    assert isinstance(layer.weight, DTensor)
            made.train()
            if rank == 0:
                torch.save(losses(made), place / f"{kind}, {stored}.pt")


def spread_main(rank: int, folder: str, how: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for kind in KINDS:
            made = trainer(place, kind, "FP8", ADAPTED[kind], **SPREAD[how], **UNBALANCED.get(kind, {}))
            made.train()
            codes = [p for p in made.model.parameters() if is_quantized(p)]
            assert codes
            assert all(isinstance(p, DTensor) or is_partitioned(p) for p in codes)
            if rank == 0:
                torch.save(losses(made), place / f"{kind}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tp_size", pytest.param("ZeRO-3", marks=needs_deepspeed)])
def test_ranks_with_parts_of_what_is_in_float8_train_what_one_does(how, tmp_path):
    place = meeting_place(tmp_path)
    for kind, sizes in KINDS.items():
        build(kind, vocab_size=len(make_tokenizer()), **sizes).save_pretrained(place / kind)
    run_ranks(spread_main, str(place), how)
    for kind in KINDS:
        alone = trainer(place, kind, "FP8", ADAPTED[kind], **UNBALANCED.get(kind, {}))
        alone.train()
        assert torch.allclose(torch.load(place / f"{kind}.pt"), losses(alone), atol=2e-5)


def test_parts_that_gpus_cannot_multiply_are_refused():
    model: Any = build("llama", intermediate_size=48)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            put_in_float8(module, torch.device("cpu"))
    ranks, mesh = cast(Any, types.SimpleNamespace(size=2, rank=0)), cast(Any, None)
    with pytest.raises(ValueError, match="of its width 48 each of 2 ranks would have 24, which is no multiple of 16"):
        split_layers(model, ranks, mesh, torch.device("cpu"))
    pytest.importorskip("torchao")
    model.model.layers[0].self_attn.q_proj = nn.Linear(*model.model.layers[0].self_attn.q_proj.weight.shape[::-1])
    put_in_nvfp4(model.model.layers[0].self_attn.q_proj, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"NVFP4Tensor.* Take base_dtype='float8', or leave `tp_size` out"):
        split_layers(model, ranks, mesh, torch.device("cpu"))


def test_weights_that_deepspeed_cannot_send_are_refused():
    pytest.importorskip("torchao")
    model: Any = build("llama", intermediate_size=64)
    put_in_float8(model.model.layers[0].mlp.up_proj, torch.device("cpu"))
    check_sendable(model)
    put_in_nvfp4(model.model.layers[1].mlp.up_proj, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight is in torchao's form.*base_dtype='float8'"):
        check_sendable(model)


@pytest.mark.slow
def test_two_ranks_train_what_one_does(tmp_path):
    pytest.importorskip("bitsandbytes")
    place = meeting_place(tmp_path)
    for kind, sizes in KINDS.items():
        model = build(kind, vocab_size=len(make_tokenizer()), **sizes)
        model.save_pretrained(place / kind)
    run_ranks(rank_main, str(place))
    for kind, stored in CASES:
        alone = trainer(place, kind, stored)
        alone.train()
        assert torch.allclose(torch.load(place / f"{kind}, {stored}.pt"), losses(alone), atol=1e-3)
