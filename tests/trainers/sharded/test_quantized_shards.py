"""Weights in 4 bits and in FP8 that are cut into shards, those of linear layers and of stacks of experts: two ranks
train what one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig

from lowtide import SFTConfig, SFTTrainer
from lowtide.demo.model import make_tokenizer
from lowtide.engine.weights.quantized import is_quantized
from tests.support.models.tiny_models import build
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.distilling import losses

ROWS = [{"text": f"{one} + {one + 3} = {2 * one + 3}"} for one in range(16)]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
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


def trainer(folder: Path, kind: str, stored: str, **options: Any) -> Any:
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
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear-experts"),
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
