"""Texts of generated words, a WordPiece tokenizer of their pieces, and encoders of several families that hide some."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from lowtide import MaskedLMConfig, MaskedLMTrainer
from tests.support.runs.on_a_cpu import ON_A_CPU

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
STEMS = ["tide", "boat", "shell", "stone", "wave", "gull", "sand", "pool"]
ENDS = ["s", "ward", "wards", "man"]
PAD, CLS, SEP, MASK = (SPECIAL.index(name) for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]"))
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0},
    "modernbert": {
        **{"local_attention": 8, "global_attn_every_n_layers": 2},
        **{"cls_token_id": CLS, "sep_token_id": SEP, "bos_token_id": CLS, "eos_token_id": SEP},
    },
}
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
    **ON_A_CPU,
    "rehearsal": False,
    "gradient_checkpointing": False,
}


@cache
def tokenizer(mask_token: str | None = "[MASK]") -> PreTrainedTokenizerFast:
    """Words of one or two pieces, between [CLS] and [SEP]."""
    pieces = [*SPECIAL, *STEMS, *(f"##{end}" for end in ENDS)]
    made = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", CLS), ("[SEP]", SEP)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, mask_token=mask_token, **names)


def texts(count: int, longest: int = 20, seed: int = 0) -> Dataset:
    """Rows of words, of very different lengths."""
    rng = random.Random(seed)
    lengths = (rng.randint(3, longest) for _ in range(count))
    lines = [" ".join(rng.choice(STEMS) + rng.choice(["", *ENDS]) for _ in range(length)) for length in lengths]
    return Dataset.from_list([{"text": line} for line in lines])


def build(family: str = "bert", **more: Any) -> PreTrainedModel:
    """Seeded weights, large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], "vocab_size": len(tokenizer()), **more})
    model = AutoModelForMaskedLM.from_config(config)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    return model


def make(folder: Any, rows: Dataset, *, family: str = "bert", **options: Any) -> MaskedLMTrainer:
    """A trainer; `options` are of the config, and `eval_dataset`, `peft_config` and `data_collator` of the trainer."""
    names = ("eval_dataset", "peft_config", "data_collator", "processing_class", "model")
    arguments = {"model": build(family), "processing_class": tokenizer()}
    arguments |= {name: options.pop(name) for name in names if name in options}
    args = MaskedLMConfig(output_dir=str(folder), **{**COMMON, **options})
    return MaskedLMTrainer(args=args, train_dataset=rows, **arguments)


def losses(trainer: Any) -> list[float]:
    """Of each step that was logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
