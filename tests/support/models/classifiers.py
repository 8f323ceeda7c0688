"""Tiny reward models: a sequence classifier with one label, and one of tokens with two, for steps of completions."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_labels": 1,
}


def classifier(model_type: str = "llama", **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    return AutoModelForSequenceClassification.from_config(config).eval()


def step_classifier(model_type: str = "llama", **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, "num_labels": 2, **changes})
    return AutoModelForTokenClassification.from_config(config).eval()
