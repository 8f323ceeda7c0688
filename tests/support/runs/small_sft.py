"""A small SFT trainer with dropout, on generated token rows of unequal length."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import SFTConfig, SFTTrainer


def rows(count: int = 24, longest: int = 30) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    made = [torch.randint(0, 40, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": made, "labels": made})


def trainer(folder: Path, **options) -> SFTTrainer:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
    )
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        **options,
    }
    return SFTTrainer(model, SFTConfig(**settings), train_dataset=rows())
