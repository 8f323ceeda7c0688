"""When a completion is over: at a token, or at a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.rollout.generators.generator import Sampling

BORDER = 4
"""Tokens before those that may spell a stop string. Decoded from its middle, a row begins with what depends on the
tokens before: a space that is left out, or bytes that are no character alone."""


class Stops:
    """Tells whether the last token ends a completion.

    Args:
        sampling: whose `stop_ids` and `stop_strings` end it.
        tokenizer: of transformers; needed for stop strings alone.
    """

    def __init__(self, sampling: Sampling, tokenizer: Any = None):
        if sampling.stop_strings and tokenizer is None:
            raise ValueError(
                f"stop strings {list(sampling.stop_strings)} are found in decoded text: give the generator a "
                "`tokenizer`"
            )
        self.ids, self.strings, self.tokenizer = frozenset(sampling.stop_ids), sampling.stop_strings, tokenizer
        self.longest = max((len(text) for text in self.strings), default=0)
        # A token that is not empty has a byte at least.
        self.reach = max((len(text.encode()) for text in self.strings), default=0) + BORDER

    def at_end(self, token_ids: Sequence[int], start: int = 0) -> bool:
        """Whether the last token is a stop, or completes a stop string.

        Args:
            start: where the policy's turn begins; what stands before it is not searched.
        """
        if token_ids[-1] in self.ids:
            return True
        return bool(self.strings) and any(text in self._tail(token_ids, start) for text in self.strings)

    def _tail(self, token_ids: Sequence[int], start: int) -> str:
        """The text at the end in which a stop string may lie that the last token completes."""
        count = self.reach
        while True:
            first = max(start, len(token_ids) - count)
            kept = list(token_ids[first:])
            text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            # Tokens without text of their own take up places.
            if first == start or len(text) >= self.longest + BORDER:
                return text
            count *= 2
