"""What the trainers of the matrix train: tiny models of each kind, and a few rows for them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    ElectraConfig,
    ElectraForPreTraining,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

TRAINERS = ("SFT", "DPO", "KTO", "Reward", "ORPO", "CPO", "BCO")
ONLINE = ("GRPO", "RLOO", "OnlineDPO", "PPO")
OF_BERT = ("TokenClassification", "SequenceClassification", "MaskedLM")
ENCODERS = (*OF_BERT, "ReplacedTokenDetection")
DECODERS = (*TRAINERS, *ONLINE, "GKD", "Pretrain")
"""Trainers of the tiny Llama, of each kind of rows and of models beside the policy."""
RELATED = ("TPO", "PRM", "GMPO", "A2PO", "Distillation", "IWOPD", "SDFT", "SDPO", "GOLD")
"""Further ones, each of which learns from rows and beside models as one of those does."""
EVERY_TRAINER = (*DECODERS, *RELATED, *ENCODERS, "Seq2Seq")
"""The columns of the table; other tests go by `TRAINERS`, since a run of an online trainer takes longer, and not all
that holds for decoders is meant for encoders."""
REWARDED = (*ONLINE, "GMPO", "A2PO", "SDPO")
TAUGHT = ("GKD", "Distillation", "IWOPD", "GOLD")
"""Those with a teacher, which of GOLD has tokens of its own."""
WRITING = (*REWARDED, "Distillation", "IWOPD", "SDFT")
"""Those whose policy writes."""
TASKS = (*ENCODERS, "Seq2Seq", "GKD", "Pretrain")
"""Those that learn from texts, or from what is said of them, and not from preferences."""
UNPAIRED = ("KTO", "BCO")
TAGS = ("question", "answer", "wrong", "more", "most")
"""Of the words of a row."""
ROWS = 16
NO_TEXT = "ÿ"
"""The piece of a byte that no text of UTF-8 has."""
JOINED = ("o", "r"), ("Ġ", "or"), ("m", "o"), ("1", "2")
"""Pieces that are one token of a teacher with tokens of its own."""


@functools.cache
def tokenizer(joined: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """A byte is a token, but for pieces that are joined."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<eos>", *alphabet, *map("".join, joined)]
    made = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, list(joined)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", mask_token=NO_TEXT)


def build(
    kind: str, intermediate_size: int, seed: int = 0, *, vocab_size: int | None = None, recurrent: bool = False
) -> PreTrainedModel:
    """Two layers, or two of an encoder and two of a decoder, with weights large enough for attention to be far from
    uniform; of a decoder the first is recurrent, if asked for."""
    torch.manual_seed(seed)
    if kind == "Seq2Seq":
        return _encoder_decoder(intermediate_size)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size or len(tokenizer()),
        "hidden_size": 32,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.1,
        "num_labels": len(TAGS) if kind.endswith("Classification") else 2 if kind == "PRM" else 1,
    }
    if kind in ENCODERS:
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if kind == "ReplacedTokenDetection":
            return ElectraForPreTraining(ElectraConfig(**sizes, embedding_size=32))
        return getattr(transformers, f"BertFor{kind}")(BertConfig(**sizes))
    sizes |= {"num_key_value_heads": 2, "eos_token_id": 0}
    config = Qwen3NextConfig(**sizes, **RECURRENT) if recurrent else LlamaConfig(**sizes)
    return FAMILIES.get(kind, AutoModelForCausalLM).from_config(config)


RECURRENT: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mlp_only_layers": [0, 1],
}
FAMILIES = {"Reward": AutoModelForSequenceClassification, "PRM": AutoModelForTokenClassification}


def _encoder_decoder(intermediate_size: int) -> PreTrainedModel:
    config = T5Config(
        vocab_size=len(tokenizer()),
        d_model=32,
        d_kv=8,
        d_ff=intermediate_size,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


DECODER_PARTS = "input_layernorm", "mlp.act_fn"
ENCODER_PARTS = "attention", "intermediate.intermediate_act_fn"
PARTS = {"bert": ENCODER_PARTS, "electra": ENCODER_PARTS, "t5": ("layer.0", "layer.1.DenseReluDense.act")}
"""Of a first layer: what its input passes first, and the activation function. Other families have `DECODER_PARTS`."""


def parts(model: Any) -> tuple[str, str]:
    return PARTS.get(model.config.model_type, DECODER_PARTS)


def rows(kind: str) -> Dataset:
    """`ROWS` rows of different lengths; single completions come in twos with one prompt."""
    pairs = [
        {
            "prompt": f"{n * n}+{n}=",
            "chosen": f"{n * n + n}" + "!" * (n % 3),
            "rejected": f"{n + 1}" + " or more" * (n % 3),
        }
        for n in range(ROWS)
    ]
    if kind in WRITING:
        return Dataset.from_list(
            [{"prompt": p["prompt"], "answer": p["chosen"], "privileged_context": p["chosen"]} for p in pairs]
        )
    if kind == "PRM":
        steps = [{"prompt": p["prompt"], "completions": [p["rejected"], p["chosen"]]} for p in pairs]
        return Dataset.from_list([{**row, "labels": [False, True]} for row in steps])
    if kind == "TPO":
        return Dataset.from_list([{**row, "reference": row["chosen"]} for row in pairs])
    if kind in ("SFT", "Pretrain", "MaskedLM", "ReplacedTokenDetection"):
        return Dataset.from_list([{"text": row["prompt"] + row["chosen"] + row["rejected"] * 2} for row in pairs])
    if kind == "Seq2Seq":
        return Dataset.from_list(
            [{"source": row["prompt"] + row["chosen"], "target": row["rejected"]} for row in pairs]
        )
    if kind == "TokenClassification":
        tags = [*TAGS, *TAGS]
        words = [[row["prompt"], row["chosen"], *row["rejected"].split()] for row in pairs]
        return Dataset.from_list([{"tokens": each, "ner_tags": tags[: len(each)]} for each in words])
    if kind == "SequenceClassification":
        labels = [TAGS[n % len(TAGS)] for n in range(len(pairs))]
        texts = [f"{row['prompt']} {label}" for row, label in zip(pairs, labels, strict=True)]  # learned in few steps
        return Dataset.from_list([{"text": text, "label": tag} for text, tag in zip(texts, labels, strict=True)])
    if kind in UNPAIRED:
        singles = [
            {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in pairs[1 : ROWS // 2 + 1]
            for name in ("chosen", "rejected")
        ]
        return Dataset.from_list(singles)
    if kind in TAUGHT:
        return Dataset.from_list([{"prompt": row["prompt"], "completion": row["rejected"]} for row in pairs])
    return Dataset.from_list(pairs)
