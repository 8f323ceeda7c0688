"""Which word of a text each token is of, told by the text's own white space.

A tokenizer's `word_ids` are the runs of text that its pre-tokenizer made, and say as much of words as that cuts: of
tokenizers that write spaces as "▁" and cut nowhere (Gemma's form) a whole text is one, and others cut numbers into
digits. So words are cut here, from the places of the tokens in the text (`offset_mapping`): alike for all tokenizers.
transformers' collator for whole words reads the same places, and takes each gap between two tokens as the end of a
word, which tokens that hold their space do not leave.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

SPACES = np.array([code for code in range(sys.maxunicode + 1) if chr(code).isspace()], dtype=np.uint32)
WITHOUT_SPACES = np.array(
    [
        *(0x0E00, 0x1000),  # Thai, Lao, Tibetan
        *(0x1000, 0x10A0),  # Myanmar
        *(0x1780, 0x1800),  # Khmer
        *(0x2E80, 0x3130),  # radicals and punctuation of CJK, Hiragana, Katakana
        *(0x31F0, 0x3200),  # more Katakana
        *(0x3400, 0x4DC0),  # CJK ideographs, here and below
        *(0x4E00, 0xA000),
        *(0xF900, 0xFB00),
        *(0x20000, 0x40000),
    ],
    dtype=np.uint32,
)
"""Bounds of the ranges of characters, ascending, that are written without spaces between words."""


def words_of(text: str, spans: Sequence[tuple[int, int]]) -> Int[np.ndarray, " tokens"]:
    """The number of each token's word; equal ones stand side by side.

    A word reaches from white space to white space; a token of white space is of the word after it. Where a script has
    no spaces (Chinese, Japanese, Thai, ...) each token is a word. A token that reaches into several words makes one of
    them.

    Args:
        spans: where each token begins and ends in the text, in characters; of tokens that are the text's.
    """
    if not spans:
        return np.zeros(0, dtype=np.int64)
    at_or_after, at_or_before = _words_of_characters(text)
    starts, stops = np.array(spans, dtype=np.int64).T
    first = at_or_after[starts]
    last = np.maximum(first, at_or_before[np.maximum(stops - 1, starts)])
    return np.cumsum(np.append(0, first[1:] > np.maximum.accumulate(last)[:-1]))


def _words_of_characters(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The number of each character's word, and one for the end of the text: for white space that of the word after it,
    and that of the word before it."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    space = np.append(np.isin(codes, SPACES), True)
    alone = np.append(np.searchsorted(WITHOUT_SPACES, codes, side="right") % 2 == 1, False)
    starts = ~space
    starts[1:] &= space[:-1] | alone[1:] | alone[:-1]
    before = np.cumsum(starts) - 1
    return before + space, before
