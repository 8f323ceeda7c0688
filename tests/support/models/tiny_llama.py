"""A tiny Llama, and token ids to train it on."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

VOCAB = 64


def tiny_llama(*, layers: int = 2, tied: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config).to(dtype)


def token_ids(step: int, rows: int = 2, length: int = 12) -> torch.Tensor:
    """[rows, length], the same for the same step."""
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(step))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, -0.0 and NaN included."""
    integer = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.view(integer), right.view(integer))
