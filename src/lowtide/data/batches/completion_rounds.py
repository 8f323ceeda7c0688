"""Completions of several turns: the rounds in which the model writes them, each with the context that it is given.

A prepared row has the tokens of a completion's rounds one behind the other, each without what it has in common with
the row's prompt. Beside them stand the labels, the length of each round, and how many of the prompt's tokens it goes on
from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

from datasets import Features, List, Value

from lowtide.score_rules import IGNORE

LABELS, SEQ_LENGTHS, PREFIX_LENGTH = "labels", "seq_lengths", "prefix_length"


class CompletionRound(NamedTuple):
    """A part of a completion, which is written in one context."""

    token_ids: Sequence[int]
    """Without those of the prompt that it goes on from."""
    labels: Sequence[int]
    """The tokens, or -100 where one is not scored."""
    seen: int
    """So many of the prompt's first tokens stand before it."""

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        whole = self.labels is self.token_ids
        return len(self.token_ids) if whole else sum(label != IGNORE for label in self.labels)


def round_columns(completion: str) -> tuple[str, str, str]:
    """The columns of a completion's rounds: labels, lengths, and tokens of the prompt; null of a completion in one
    round that is scored whole.

    Args:
        completion: the column of its tokens.
    """
    name = completion.removesuffix("_ids")
    return f"{name}_{LABELS}", f"{name}_{SEQ_LENGTHS}", f"{name}_{PREFIX_LENGTH}"


def round_features(completions: Sequence[str]) -> Features:
    """The columns of the rounds of completions."""
    return Features({name: List(Value("int32")) for each in completions for name in round_columns(each)})


def completion_rounds(row: Mapping[str, Any], completion: str) -> list[CompletionRound]:
    """The rounds of a completion of a prepared row."""
    tokens = row[completion]
    labels, lengths, seen = cast(Any, (row.get(name) for name in round_columns(completion)))
    if lengths is None:
        return [CompletionRound(tokens, tokens, len(row["prompt_ids"]))]
    bounds = pairwise(accumulate(lengths, initial=0))
    return [
        CompletionRound(tokens[start:stop], labels[start:stop], most)
        for (start, stop), most in zip(bounds, seen, strict=True)
    ]
