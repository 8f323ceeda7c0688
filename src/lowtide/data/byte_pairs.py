"""A tokenizer learned from texts: byte-level byte pair encoding, by the tokenizers library.

Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners", section 2.2): pairs of neighbouring symbols
that are most frequent become one symbol, again and again, beginning with the 256 bytes, so that every text can be
written and decoding gives it back exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END, PAD, START, MASK = "<|endoftext|>", "<|pad|>", "<|start|>", "<|mask|>"
LEAST = 256 + 4
"""Bytes, and the special tokens."""


def learn_tokenizer(texts: Iterable[str], vocabulary: int, *, masks: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of texts like these.

    Args:
        vocabulary: tokens at most, special ones included; texts with fewer pairs give fewer.
        masks: whether it is for a masked language model: with a mask token, and one at the start and one at the end of
            each text.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [END, PAD, *((START, MASK) if masks else ())]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    roles = {"eos_token": END, "pad_token": PAD}
    if masks:
        roles |= {"bos_token": START, "cls_token": START, "sep_token": END, "mask_token": MASK}
        ends = [(name, made.token_to_id(name)) for name in (START, END)]
        made.post_processor = processors.TemplateProcessing(
            single=f"{START} $A {END}", pair=f"{START} $A {END} $B:1 {END}:1", special_tokens=ends
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **roles)
