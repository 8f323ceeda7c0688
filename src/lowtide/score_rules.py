"""Which positions of a segment are scored, and what is predicted there.

A causal language model predicts a token at the one before it, a tagger or a masked language model at the token itself,
a reward is read at the last token, and a classifier of texts reads the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

IGNORE = -100
"""The label of a token that is not scored, as everywhere in the field."""


class LaidSegment(NamedTuple):
    """A segment with its place in a batch, as a rule of scores sees it."""

    start: int
    """Place of its first token."""
    token_ids: Sequence[int]
    labels: Sequence[int]
    before: LaidSegment | None
    """Its prefix."""
    is_prefix: bool
    """Whether other segments go on from it."""


class ScoreRule(Protocol):
    """Which positions are scored, and what is predicted there."""

    def places(self, segment: LaidSegment) -> tuple[Int[Tensor, " scores"], Int[Tensor, " scores"]]:
        """`score_index` and `score_target` of the scores that count for one segment."""
        ...


@dataclass(frozen=True)
class NextToken:
    """A label is predicted at the token before it, as by a causal language model; the first token's in the prefix."""

    def places(self, segment: LaidSegment) -> tuple[Tensor, Tensor]:
        target, before = torch.as_tensor(segment.labels, dtype=torch.long), segment.before
        place = torch.nonzero(target != IGNORE).flatten()
        if before is None:
            place = place[place > 0]
        index = place + (segment.start - 1)
        if before is not None:
            index[place == 0] = before.start + len(before.token_ids) - 1
        return index, target[place]


@dataclass(frozen=True)
class LastToken:
    """One score in each segment that is no prefix, at its last token, as a reward is read; its target is 0.

    Labels are not read.
    """

    pad_id: int | None = None
    """A token that is passed over at the end, which may lead into the prefix; where there is no other token, the score
    is at the first."""

    def places(self, segment: LaidSegment) -> tuple[Tensor, Tensor]:
        index = torch.tensor([] if segment.is_prefix else [self._last_place(segment)], dtype=torch.long)
        return index, torch.zeros_like(index)

    def _last_place(self, segment: LaidSegment) -> int:
        first, part = segment, segment
        while part is not None:
            for place in range(len(part.token_ids) - 1, -1, -1):
                if part.token_ids[place] != self.pad_id:
                    return part.start + place
            first, part = part, part.before
        return first.start


@dataclass(frozen=True)
class OwnToken:
    """A label is predicted at its own token, as by a tagger or a masked language model."""

    def places(self, segment: LaidSegment) -> tuple[Tensor, Tensor]:
        target = torch.as_tensor(segment.labels, dtype=torch.long)
        place = torch.nonzero(target != IGNORE).flatten()
        return place + segment.start, target[place]


@dataclass(frozen=True)
class FirstToken:
    """One score in each segment, at its first token, as an encoder's classifier reads a text; its target is 0.

    Labels are not read.
    """

    def places(self, segment: LaidSegment) -> tuple[Tensor, Tensor]:
        index = torch.tensor([segment.start])
        return index, torch.zeros_like(index)


@dataclass(frozen=True)
class ShiftedRight(OwnToken):
    """The same of a decoder, whose tokens are the labels of a target, each one place later."""

    start: int | None
    """The token before the first; None where the target's last one stands there too (mBART)."""
    pad: int
    """The token in the place of a label that is not scored."""

    def tokens(self, target: Sequence[int]) -> list[int]:
        """What the decoder is given for a target."""
        first = target[-1] if self.start is None else self.start
        return [self.pad if token == IGNORE else token for token in (first, *target[:-1])]


NEXT_TOKEN = NextToken()
OWN_TOKEN = OwnToken()
FIRST_TOKEN = FirstToken()
