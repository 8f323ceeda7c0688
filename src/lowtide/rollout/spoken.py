"""What a model writes, as text while it writes: whole characters, and thoughts apart from what is said.

A token may end in the middle of a character, and a mark that begins or ends a thought may be spread over several
tokens: both are held back until they are whole. Decoding a window of the last tokens twice, with and without the new
one, is how vLLM and text-generation-inference keep the spaces that tokenizers leave out at the beginning of a text.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

MARKS = {
    "<think>": True,
    "</think>": False,
    "[THINK]": True,
    "[/THINK]": False,
    "<seed:think>": True,
    "</seed:think>": False,
    "<|channel|>analysis<|message|>": True,
    "<|channel|>commentary<|message|>": True,
    "<|channel|>final<|message|>": False,
    "<|end|><|start|>assistant": True,
}
"""Texts of chat templates, and whether what follows them is thought (Qwen, DeepSeek and most others; Mistral; Seed;
gpt-oss)."""
BROKEN = "\ufffd"
"""What stands for bytes that are no character yet."""


class Piece(NamedTuple):
    """A part of what is written."""

    text: str
    is_thought: bool = False
    is_mark: bool = False
    """Whether it begins or ends a thought, and says nothing itself."""


class Decoder:
    """Tokens to text, one by one.

    Args:
        tokenizer: of transformers.
        hidden: tokens that are left out, such as those that end a turn.
    """

    def __init__(self, tokenizer: Any, hidden: Collection[int] = ()) -> None:
        self.tokenizer, self.hidden = tokenizer, frozenset(hidden)
        self._ids: list[int] = []
        self._start = self._read = 0

    def feed(self, token: int) -> str:
        """The text that a token completes; empty where a character is not whole."""
        if token in self.hidden:
            return ""
        self._ids.append(token)
        before, now = self._decoded(self._ids[self._start : self._read]), self._decoded(self._ids[self._start :])
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What is held back, at the end."""
        before, now = self._decoded(self._ids[self._start : self._read]), self._decoded(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return now[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Thoughts:
    """Texts to pieces, of which each is a thought or not.

    Args:
        prompt: what stands before; a thought may be open at its end.
    """

    def __init__(self, prompt: str = "") -> None:
        ending = prompt.rstrip()
        self.thinks = any(thinks and ending.endswith(mark) for mark, thinks in MARKS.items())
        self._waiting = ""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that a text completes."""
        self._waiting += text
        pieces: list[Piece] = []
        while found := min(((self._waiting.find(m), -len(m), m) for m in MARKS if m in self._waiting), default=None):
            place, _, mark = found
            pieces += [Piece(self._waiting[:place], self.thinks), Piece(mark, is_mark=True)]
            self.thinks, self._waiting = MARKS[mark], self._waiting[place + len(mark) :]
        kept = next((n for n in range(len(self._waiting), 0, -1) if _may_begin(self._waiting[-n:])), 0)
        ready = len(self._waiting) - kept
        pieces.append(Piece(self._waiting[:ready], self.thinks))
        self._waiting = self._waiting[ready:]
        return [piece for piece in pieces if piece.text]

    def rest(self) -> list[Piece]:
        """What is held back, at the end."""
        kept, self._waiting = self._waiting, ""
        return [Piece(kept, self.thinks)] if kept else []


class Speech:
    """Tokens to pieces: `Decoder` and `Thoughts` one after the other.

    Args:
        tokenizer: of transformers. Its special tokens are left out, but for those that are parts of marks.
        prompt: what stands before, as text.
        stop_ids: further tokens that are left out.
    """

    def __init__(self, tokenizer: Any, prompt: str = "", stop_ids: Collection[int] = ()) -> None:
        marks = "".join(MARKS)
        special = (each for each in tokenizer.all_special_ids if tokenizer.decode([each]) not in marks)
        self.decoder, self.thoughts = Decoder(tokenizer, {*special, *stop_ids}), Thoughts(prompt)

    def feed(self, token: int) -> list[Piece]:
        """The pieces that a token completes."""
        return self.thoughts.feed(self.decoder.feed(token))

    def rest(self) -> list[Piece]:
        """What is held back, at the end of a turn."""
        return [*self.thoughts.feed(self.decoder.rest()), *self.thoughts.rest()]


def _may_begin(text: str) -> bool:
    """Whether a mark may begin with a text and go on behind it."""
    return any(mark.startswith(text) and mark != text for mark in MARKS)
