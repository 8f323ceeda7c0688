"""A small model with a tokenizer of bytes and a chat template, saved as a run saves it."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.support.texts.byte_tokenizer import byte_tokenizer
from tests.support.texts.chatml import CHATML


@pytest.fixture(scope="session")
def talker(tmp_path_factory) -> Path:
    """The folder of a model with random weights, which writes bytes, and stops at none of its own accord."""
    folder = tmp_path_factory.mktemp("talker")
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>", pad="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[:3] = 0
    model.generation_config = GenerationConfig(eos_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
