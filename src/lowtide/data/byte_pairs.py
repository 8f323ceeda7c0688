"""A tokenizer learned from texts: byte-level byte pair encoding, by the tokenizers library.

Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners", section 2.2): pairs of neighbouring symbols
that are most frequent become one symbol, again and again, beginning with the 256 bytes, so that every text can be
written and decoding gives it back exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|endoftext|>", "<|pad|>"
LEAST = 256 + 2
"""Bytes, and the two special tokens."""


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of texts like these.

    Args:
        vocabulary: tokens at most, special ones included; texts with fewer pairs give fewer.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
