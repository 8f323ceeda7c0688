"""Tiny runs of the trainers over prompts and completions."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from lowtide import (
    BCOConfig,
    BCOTrainer,
    CPOConfig,
    CPOTrainer,
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
    TPOConfig,
    TPOTrainer,
)

PAIRED = {
    "dpo": (DPOTrainer, DPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "tpo": (TPOTrainer, TPOConfig),
}
SINGLE = {"kto": (KTOTrainer, KTOConfig), "bco": (BCOTrainer, BCOConfig)}
ALL = PAIRED | SINGLE | {"reward": (RewardTrainer, RewardConfig)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = models.BPE({piece: n for n, piece in enumerate(["<eos>", *alphabet])}, [])
    tokenizer = Tokenizer(bytes_alone)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def rows(count: int = 16) -> list[dict]:
    return [
        {
            "prompt": f"What is {number} + {number % 5}?",
            "chosen": f" It is {number + number % 5}.",
            "rejected": f" It may be {number}, who knows?" + " Or not." * (number % 4),
        }
        for number in range(count)
    ]


def data(method: str, count: int = 16) -> Dataset:
    if method in SINGLE:
        singles = [
            {"prompt": row["prompt"], "completion": row["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
            for n, row in enumerate(rows(count))
        ]
        return Dataset.from_list(singles)
    if method == "tpo":
        return Dataset.from_list([{**row, "reference": f" {row['chosen']}"} for row in rows(count)])
    return Dataset.from_list(rows(count))


def build(method: str = "dpo", vocab: int | None = None, hidden: int = 32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab or len(make_tokenizer()),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        num_labels=1,
    )
    kind = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    return kind.from_config(config)


def trainer(method: str, folder: Path, *, model=None, dataset=None, arguments: dict | None = None, **options):
    trainer_class, config_class = ALL[method]
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return trainer_class(
        model=build(method) if model is None else model,
        args=config_class(**defaults | options),
        train_dataset=data(method) if dataset is None else dataset,
        **{"processing_class": make_tokenizer()} | (arguments or {}),
    )


def weights(of) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in of.model.named_parameters()}


def assert_same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
