"""Masks of masked language modelling: which tokens of a batch are to be predicted, and what stands in their places.

Each decision is a random number by counting (`ops.counter_random`), whose key is of (seed, epoch, row) and whose
counter is the token's place in its row. So masks are new in each epoch, and do not depend on how a batch is cut, on how
many ranks share it, or on where a run was resumed.

Masks are runs of units, which are tokens or whole words. At each unit a run begins with a probability q, and is as long
as is drawn: 1 (BERT, arXiv 1810.04805), up to 10 with geometric probabilities (SpanBERT, arXiv 1907.10529), or up to 3
with probability proportional to 1/n (the n-grams of ALBERT, arXiv 1909.11942). Runs may overlap. q is chosen so that
each unit is masked with the requested probability, the first ones of a text too: into these reach runs that would have
begun before it. BERT, SpanBERT and ALBERT mask an equal share of each text instead; here the share of a text varies, as
it does with transformers' collator.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lowtide.data.batches.values import DRAW, NUMBER, WORDS
from lowtide.ops.counter_random import stream_key, uniforms
from lowtide.ragged import RaggedBatch

EVALUATION = -1
"""In place of an epoch: evaluation draws the same masks every time."""
BEGINS, LENGTH, CARRIED, REPLACED, TOKEN, GENERATED = range(6)
"""What is drawn at a token: whether a run begins, its length, how far an earlier run reaches into the text, what stands
in the token's place, the random token, and the number that a generator draws a token with."""
DRAWS = 8
"""Counters of a token."""
ONE_TOKEN = (1.0,)
"""Of masks that are single units."""


def geometric(p: float, longest: int) -> tuple[float, ...]:
    """The probabilities of the lengths 1 to `longest`, those of a geometric distribution among each other."""
    return _shares([p * (1 - p) ** n for n in range(longest)])


def harmonic(longest: int) -> tuple[float, ...]:
    """The probabilities of the lengths 1 to `longest`, proportional to 1/length."""
    return _shares([1 / n for n in range(1, longest + 1)])


def _shares(weights: list[float]) -> tuple[float, ...]:
    return tuple(weight / sum(weights) for weight in weights)


@dataclass(frozen=True)
class Masking:
    """Draws the masks of a batch. Its scores are the tokens that may be masked, its row value `number` says of which
    row they are, and its score value `words`, where it is there, makes words the units."""

    probability: float
    """Of each unit to be masked."""
    mask_token: int
    vocabulary: int
    """Random tokens are below it."""
    special: tuple[int, ...] = ()
    """Tokens, ascending, that are not drawn: models tell positions and segments by some of them."""
    mask_share: float = 0.8
    """Of the masked tokens, those in whose place the mask token stands."""
    random_share: float = 0.1
    """Those in whose place a random token stands. The others stay."""
    lengths: tuple[float, ...] = ONE_TOKEN
    """The probabilities of the lengths of runs, in units, from 1 on."""
    as_one: bool = False
    """What stands in the place of a run is decided for the run, not for each token."""
    generated: bool = False
    """Whether a generator draws a token in the place of each masked one, with the score value `DRAW`."""
    seed: int = 0

    def __call__(self, batch: RaggedBatch, epoch: int) -> RaggedBatch:
        """The batch with the masks of an epoch: masked tokens alone are scored. Rows with the number -1 stay as they
        are."""
        numbers = batch.row_values[NUMBER].tolist()
        row = batch.row[batch.score_segment]
        keys = torch.tensor([stream_key(self.seed, epoch, number) for number in numbers], device=row.device)[row]
        starts = torch.tensor(_row_starts(batch), device=row.device)[row]
        draws = _Draws(keys, batch.score_index - starts)
        given = torch.tensor([number < 0 for number in numbers], device=row.device)[row]
        units = _Units.of(batch)
        chosen = self._chosen(draws, units) & ~given
        token_ids = self._replaced(batch, draws, units, chosen)
        values = {name: value for name, value in batch.score_values.items() if name != WORDS}
        if self.generated:
            values[DRAW] = draws.at(GENERATED)
        return replace(batch, token_ids=token_ids, score_values=values).select_scores(chosen | given)

    def _chosen(self, draws: _Draws, units: _Units) -> Bool[Tensor, " scores"]:
        """Which tokens are masked: those that a run which began at or before them reaches."""
        place = units.place + units.group * len(self.lengths)  # no run reaches from one group into the next
        length = 1 + _inverse(draws.at(LENGTH)[units.first], self._lengths_below)
        carried = _inverse(draws.at(CARRIED)[units.first], self._carried_below)
        begins = draws.at(BEGINS)[units.first] < self.begin_probability
        reach = torch.where(begins, place + length, place)
        reach = torch.where(units.opens, torch.maximum(reach, place + carried), reach)
        return torch.cummax(reach, 0).values > place if len(reach) else begins

    def _replaced(
        self, batch: RaggedBatch, draws: _Draws, units: _Units, chosen: Bool[Tensor, " scores"]
    ) -> Int[Tensor, " tokens"]:
        """The batch's tokens, with others in the places of those that are masked."""
        share = draws.at(REPLACED)
        if self.as_one:
            share = share[_latest(chosen & ~(_before(chosen) & ~units.begins_group))]
        old = batch.token_ids[batch.score_index]
        new = torch.where(share < self.mask_share + self.random_share, self._tokens(draws), old)
        new = torch.where(share < self.mask_share, self.mask_token, new)
        return batch.token_ids.index_copy(0, batch.score_index, torch.where(chosen, new, old))

    def _tokens(self, draws: _Draws) -> Int[Tensor, " scores"]:
        """Random tokens that are not special ones."""
        count = self.vocabulary - len(self.special)
        number = (draws.at(TOKEN) * count).long().clamp(max=count - 1)
        before = [token - place for place, token in enumerate(self.special)]  # of each, the others below it
        return number + torch.searchsorted(torch.tensor(before, device=number.device), number, right=True)

    @functools.cached_property
    def longer(self) -> list[float]:
        """The probability of a run to be longer than 0, 1, ... units."""
        return [1 - below for below in (0.0, *itertools.accumulate(self.lengths[:-1]))]

    @functools.cached_property
    def begin_probability(self) -> float:
        """Of a run to begin at a unit: a unit is left out with probability prod(1 - q P(length > k)), which is to be
        one less `probability`."""
        low, high = 0.0, 1.0
        while low < (middle := (low + high) / 2) < high:
            left_out = math.prod(1 - middle * longer for longer in self.longer)
            low, high = (middle, high) if left_out > 1 - self.probability else (low, middle)
        return high

    @functools.cached_property
    def _lengths_below(self) -> list[float]:
        """The probability of a run to be no longer than 1, 2, ... units, but for the longest."""
        return [1 - longer for longer in self.longer[1:]]

    @functools.cached_property
    def _carried_below(self) -> list[float]:
        """The probability that runs which would have begun before a text reach no further than 0, 1, ... units into it,
        but for the most."""
        q = self.begin_probability
        return [
            math.prod(1 - q * longer for longer in self.longer[reach + 1 :]) for reach in range(len(self.longer) - 1)
        ]


@dataclass(frozen=True)
class _Draws:
    """Random numbers of each score."""

    keys: Int[Tensor, " scores"]
    places: Int[Tensor, " scores"]
    """In its row."""

    def at(self, purpose: int) -> Float[Tensor, " scores"]:
        return uniforms(self.keys, self.places * DRAWS + purpose)


@dataclass(frozen=True)
class _Units:
    """The tokens or words that are masked as wholes, by scores. Those of a group stand side by side in a segment."""

    first: Int[Tensor, " scores"]
    """The first score of its unit."""
    place: Int[Tensor, " scores"]
    """The unit's number in the batch."""
    group: Int[Tensor, " scores"]
    opens: Bool[Tensor, " scores"]
    """Whether its unit is the first of a group."""
    begins_group: Bool[Tensor, " scores"]

    @classmethod
    def of(cls, batch: RaggedBatch) -> _Units:
        index, segment, words = batch.score_index, batch.score_segment, batch.score_values.get(WORDS)
        begins_group = _changes(segment) | _changes(index, step=1)
        begins = torch.ones_like(begins_group) if words is None else begins_group | _changes(words)
        first = _latest(begins)
        return cls(first, begins.cumsum(0), begins_group.cumsum(0), begins_group[first], begins_group)


def _row_starts(batch: RaggedBatch) -> list[int]:
    """[rows]: the place of each row's first token."""
    return [batch.segments[segments[0]].start for segments in batch.row_segments]


def _changes(values: Int[Tensor, " scores"], step: int = 0) -> Bool[Tensor, " scores"]:
    """Where a value is another than the one before it and `step`; true at the first."""
    changes = torch.ones_like(values, dtype=torch.bool)
    changes[1:] = values[1:] != values[:-1] + step
    return changes


def _before(values: Bool[Tensor, " scores"]) -> Bool[Tensor, " scores"]:
    """Of each place the value at the one before."""
    return torch.cat([values.new_zeros(min(1, len(values))), values[:-1]])


def _latest(marks: Bool[Tensor, " scores"]) -> Int[Tensor, " scores"]:
    """Of each place, the last one with a mark up to it; 0 where there is none."""
    places = torch.where(marks, torch.arange(len(marks), device=marks.device), 0)
    return torch.cummax(places, 0).values if len(places) else places


def _inverse(values: Float[Tensor, " scores"], below: list[float]) -> Int[Tensor, " scores"]:
    """The outcomes 0, 1, ... of uniform numbers, from the probabilities of at most 0, 1, ..., the last left out."""
    return torch.searchsorted(torch.tensor(below, dtype=values.dtype, device=values.device), values, right=True)
