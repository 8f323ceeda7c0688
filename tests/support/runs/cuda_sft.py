"""Supervised fine-tuning of a small model as the tests on CUDA run it."""

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lowtide import SFTConfig, SFTTrainer

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def build(vocab: int = 500, family: type = LlamaConfig, **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(family(vocab_size=vocab, **SHAPE, **changes))


def rows(count: int, longest: int, vocab: int) -> Dataset:
    """Token rows of unequal length, drawn from few tokens so that there is something to learn."""
    generator = np.random.default_rng(0)
    drawn = [generator.integers(2, vocab // 10, generator.integers(2, longest + 1)) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [row.tolist() for row in drawn], "labels": [row.tolist() for row in drawn]})


def train(folder, model: PreTrainedModel, dataset: Dataset, **changes) -> SFTTrainer:
    options = {
        "output_dir": str(folder),
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 8,
    }
    trainer = SFTTrainer(model, SFTConfig(**{**options, **changes}), train_dataset=dataset)
    trainer.train()
    return trainer


def losses(trainer: SFTTrainer) -> torch.Tensor:
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
