"""Rewards of steps as reward functions return them: values at tokens of a completion, or at characters of its text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.rollout.rewards.completed import Completed

UNFINISHED = "\ufffd"
"""What a tokenizer writes for the first tokens of a character of several."""
WANTED = (
    "rewards of steps are a list of (token, reward) pairs, with the number of the token that ends each step, from 0; "
    "or {'characters': pairs}, with the characters of the completion up to the end of each step"
)


class Column(NamedTuple):
    """What a function gave to each completion."""

    rewards: Float[Tensor, " completions"]
    """Float64; NaN where it gave nothing, and the sum of what it gave to steps."""
    steps: Sequence[tuple[int, int, float]] = ()
    """(completion, token, reward) of each step."""

    @classmethod
    def of(cls, given: Sequence[float | list[tuple[int, float]]]) -> Column:
        """From a number a completion, or the (token, reward) pairs of its steps; without a pair it has no reward."""
        of_steps = [each if isinstance(each, list) else [] for each in given]
        sums = [(sum(v for _, v in each) if each else math.nan) if isinstance(each, list) else each for each in given]
        steps = [(n, *pair) for n, pairs in enumerate(of_steps) for pair in pairs]
        return cls(torch.tensor(sums, dtype=torch.float64), steps)


def places_of(given: Any, completed: Completed, number: int) -> Iterator[tuple[int, Any]]:
    """(token, reward) of the steps of a completion, from what a function returned for it.

    Raises:
        ValueError: it is no list of pairs, or a step ends where the completion has no token; says how many it has.
    """
    by_characters = isinstance(given, Mapping)
    if by_characters and set(given) != {"characters"}:
        raise ValueError(f"got a mapping with {', '.join(map(repr, given)) or 'nothing'}; {WANTED}")
    pairs = given["characters"] if by_characters else given
    in_pairs = isinstance(pairs, list | tuple)
    if not in_pairs or not all(isinstance(each, list | tuple) and len(each) == 2 for each in pairs):
        raise ValueError(f"got {str(given)[:80]}; {WANTED}")
    ids = completed.completion_ids
    if ids is None:
        raise ValueError("a judge's rewards are of whole completions: return numbers")
    found = TokensOf(completed, number) if by_characters else None
    tokens = len(ids[number])
    for place, value in pairs:
        if isinstance(place, bool) or not hasattr(place, "__index__"):
            raise ValueError(f"a step ends at {str(place)[:40]!r}, which is no whole number; {WANTED}")
        place = place.__index__()
        if found is not None:
            yield found.at(place), value
        elif not 0 <= place < tokens:
            raise ValueError(
                f"a step ends at token {place}, and the completion has {tokens} tokens (0 to {tokens - 1})"
            )
        else:
            yield place, value


class TokensOf:
    """Where characters of a completion's text stand among its tokens.

    Raises:
        ValueError: the completion has several turns, whose tokens are not those of one text.
    """

    def __init__(self, completed: Completed, number: int) -> None:
        assert completed.completion_ids is not None
        if completed.tokenizer is None:
            raise ValueError("places by characters are for completions of one turn without tools: give tokens")
        self.ids = list(completed.completion_ids[number])
        self.tokenizer = completed.tokenizer
        self.characters = self._before(len(self.ids))

    def at(self, characters: int) -> int:
        """The token with which the text has so many characters.

        Raises:
            ValueError: the text is shorter; says how long it is.
        """
        if not 1 <= characters <= self.characters:
            raise ValueError(f"a step ends after {characters} characters, and the completion has {self.characters}")
        low, high = 1, len(self.ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._before(middle) >= characters else (middle + 1, high)
        return low - 1

    def _before(self, tokens: int) -> int:
        """Whole characters of the first tokens."""
        return len(self.tokenizer.decode(self.ids[:tokens], skip_special_tokens=True).rstrip(UNFINISHED))
