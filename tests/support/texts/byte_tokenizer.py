"""A tokenizer without training: each byte is a token, and so is each special text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<eos>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(
    template: str | None = None, eos: str | None = "<eos>", pad: str | None = None, more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Ids 0 to 2 are `SPECIAL`, the 256 bytes come after them, and then `more` special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({piece: n for n, piece in enumerate([*SPECIAL, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in (*SPECIAL, *more)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer
