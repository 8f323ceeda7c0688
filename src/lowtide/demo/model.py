"""A tiny language model and its tokenizer, built from nothing: no download, no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lowtide.demo.data import PHRASINGS

PAD, UNKNOWN, START, END = "<|pad|>", "<|unknown|>", "<|im_start|>", "<|im_end|>"
PIECES = r"\d|[A-Za-z]+ ?| ?[^\w\s] ?|\s"
"""A digit, a word with the space after it, a sign with the spaces around it, or white space."""
OTHER_PIECES = r"\d| ?[A-Za-z]+| ?[^\w\s]|\s"
"""Another way to cut the same texts: a digit, a word or a sign with the space before it, or white space."""
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with marks around what the assistant generates."""
SMALL: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
"""The size of the demo's models."""


def make_tokenizer(pieces: str = PIECES) -> PreTrainedTokenizerFast:
    """A tokenizer of the words and signs that the dialogues are made of; decoding gives the text back exactly.

    Args:
        pieces: how it cuts a text, as a regular expression.
    """
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    texts = ["0123456789", " + ", " = ", ", so ", "user", "assistant", "\n", *(p.format("") for p in PHRASINGS)]
    words = [piece for text in texts for piece, _ in split.pre_tokenize_str(text)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([PAD, UNKNOWN, START, END, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights: 0.2 million parameters."""
    torch.manual_seed(seed)
    vocabulary = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        **SMALL,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
    )
    return Qwen3ForCausalLM(config)


def make_with_other_tokens(seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A model as that of `make_model`, and a tokenizer that cuts the same texts into other tokens."""
    tokenizer = make_tokenizer(OTHER_PIECES)
    return make_model(tokenizer, seed), tokenizer


def save(folder: Path, seed: int, make: Callable[[int], Iterable[Any]] | None = None) -> None:
    """Make model and tokenizer and save them, as a model from the hub would lie there.

    Args:
        make: makes both from the seed; by default those of this module.
    """
    tokenizer = make_tokenizer()
    for made in make(seed) if make else (make_model(tokenizer, seed), tokenizer):
        made.save_pretrained(folder)
