"""The fastest of all combinations of settings that fits: best first, with few traces.

A trace of a run takes a second, and there are thousands of combinations. So each choice is traced by itself in one
micro-batch, when a combination with it comes up: what it does to each category of each phase is a factor, and the
factors of several choices multiply. What an allocator holds beside tensors is no part of that (`_changed`). In between
two sizes of a micro-batch bytes are linear in its tokens. What the
smaller size does is first taken from the plain settings, which is rough; it is traced for what may be chosen. What is
chosen so is traced itself before it is believed; what turns out not to fit goes back with fewer tokens, or is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from lowtide.planner.estimate import Estimate
from lowtide.planner.parallel import beside
from lowtide.ranks.sharding import Sharding

MICRO_BATCH_TOKENS = 128
"""A micro-batch costs as much as so many tokens more (weights are read, kernels started), where no roofline says it;
assumed."""
DOUBT = 1.05
"""A combination that is predicted to be this much above the budget is worth a trace all the same."""
TOO_SLOW = 1.25
"""Costs that no trace has confirmed may be this much too high."""
TRIES = 5
"""Traces of one combination, each with fewer tokens than the one before."""
AHEAD = 4
"""Of so many candidates for each trace that may be made at a time it is asked what they need next."""
ROUND = 16
"""Token budgets are multiples of this."""

STATES = ("weights", "gradients", "optimizer", "reference", "keys", "runtime")
"""Categories that do not depend on what becomes of activations, nor, but for keys, on the tokens of a micro-batch."""

HOLES = "cache"
"""The category of what an allocator holds and no tensor has."""

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""No settings."""

Combination = tuple[int, ...]
"""For each axis the number of a choice."""
Traced = tuple[Combination, int | None]
"""What a trace is of: settings, and the tokens of a micro-batch, None for the most that it may have."""
Bytes = Mapping[str, Mapping[str, float]]
"""{phase: {category: bytes}} when each phase holds most."""


class Between(NamedTuple):
    """Of a choice that does to some layers what another one does to all, and to the others what a third one does."""

    few: str
    """The choice that does to the layers what the most are spared."""
    many: str
    share: float
    """Of the layers, those that the second one is done to."""


@dataclass(frozen=True)
class Choice:
    """One way to go, of several that exclude each other."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """What a user would write; nothing where it is the default."""
    slower: float = 1.0
    """Seconds of a step as a multiple of those of the axis's first choice, where no roofline says it."""
    changes: str | None = None
    """What it changes in the numbers; None where it is exact."""
    last_resort: bool = False
    """Whether it is only for when nothing else fits: another model is trained."""
    timed: bool = True
    """False where what a step saves is spent before the first; then `slower` says what it costs in all."""
    whole: bool = False
    """Whether it does something only where a batch is one micro-batch."""
    stores: str = ""
    """What it stores in fewer bits. Of choices that store the same only one is taken: a second does nothing more,
    where factors would multiply."""
    between: Between | None = None
    """Two choices of its axis, where it lies between them, so that their traces tell what it does."""


@dataclass(frozen=True)
class Axis:
    """Choices that exclude each other, the plain one first."""

    name: str
    choices: Sequence[Choice]
    scales: bool = False
    """Whether what it does depends on the tokens of a micro-batch, beyond a factor."""


class Sizes(NamedTuple):
    """The tokens of a micro-batch: the least and the most that may be chosen."""

    longest: int
    """Of the longest row alone; of the shortest pieces, where rows are run in pieces."""
    whole: int
    """Of as many rows as it may have; of the longest pieces."""
    in_pieces: bool = False
    """Whether the longest row is run in pieces."""
    given: bool = False
    """Whether the user says the token budget, so that there is nothing to choose."""

    @property
    def budget(self) -> int | None:
        """The token budget with which a micro-batch has the most tokens, where it is to be chosen."""
        return self.whole if self.in_pieces and not self.given else None


class Candidate(NamedTuple):
    """Settings, and what is predicted of them."""

    search: Search
    """The search that found it."""
    combination: Combination
    tokens: int | None
    """Of a micro-batch; None for the most that it may have."""
    peak: float
    cost: float
    """Seconds a token, in some unit."""
    estimate: Estimate | None = None
    """By a trace of its own; None where it is predicted from those of others."""
    sharding: Sharding | None = None
    """How the run is spread over several devices."""
    spread_by: Mapping[str, Any] = NOTHING
    """The settings that spread it so."""

    @property
    def choices(self) -> list[Choice]:
        """The choice of each axis."""
        return self.search.choices(self.combination)

    @property
    def settings(self) -> dict[str, Any]:
        """What a user would write, with the token budget."""
        budget = self.search.budget(self.tokens)
        cut = {} if budget is None else {"tokens_per_microbatch": budget}
        return {**self.spread_by, **self.search.options(self.combination), **cut}

    @property
    def changes(self) -> tuple[str, ...]:
        """What its settings change in the results."""
        return tuple(choice.changes for choice in self.choices if choice.changes)

    @property
    def is_last_resort(self) -> bool:
        """Whether another model is trained, or it is only for when nothing else fits."""
        return any(choice.last_resort for choice in self.choices)

    @property
    def rank(self) -> tuple:
        """The better the smaller: no last resort, fast, exact, little to set."""
        choices = self.choices
        settings = sum(len(choice.options) for choice in choices) + (self.tokens is not None)
        inexact = sum(choice.changes is not None for choice in choices)
        return sum(choice.last_resort for choice in choices), self.cost, inexact, settings


@dataclass(frozen=True)
class Patience:
    """How long searches go on while nothing that they predicted fits."""

    seconds: float = math.inf
    began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether that time has passed."""
        return time.monotonic() - self.began > self.seconds

    @property
    def is_spent(self) -> bool:
        """Whether half as much more has passed, after which nothing is traced that was only to be shown beside."""
        return time.monotonic() - self.began > 1.5 * self.seconds


class Refused(ValueError):
    """Settings that cannot work together, or not with this model."""


Measure = Callable[[Mapping[str, Any], int | None], Estimate]
"""Options and a token budget -> what a trace says.

Raises `Refused` where they cannot work."""


class Search:
    """Over all combinations of the choices of some axes.

    Args:
        measure: traces a run.
        axes: at most one of them `scales`.
        sizes: of a micro-batch; equal where there is nothing to cut, or the user said how.
        room: bytes that the peak may take.
        at_once: traces that may be made at a time, each in a process of its own.
        patience: how long it goes on.
    """

    def __init__(
        self,
        measure: Measure,
        axes: Sequence[Axis],
        sizes: Sizes,
        room: float,
        at_once: int = 1,
        patience: Patience | None = None,
    ) -> None:
        assert sum(axis.scales for axis in axes) <= 1
        self.measure, self.axes, self.sizes, self.room, self.at_once = measure, axes, sizes, room, at_once
        self.patience = patience or Patience()
        self.traces = 0
        self.gave_up = False
        """Whether it ended before all was tried that might fit."""
        self.refused: dict[Traced, str] = {}
        self.plain: Combination = (0,) * len(axes)
        self._known: dict[Traced, Estimate] = {}

    def best(self, runners_up: int = 0, worth: float = math.inf) -> list[Candidate]:
        """The fastest that fits, which is traced, and those behind it, which are predicted; empty if nothing fits.

        Args:
            runners_up: how many.
            worth: the cost above which nothing is looked for.

        Raises:
            Refused: the plain settings cannot be traced.
        """
        self.traced(self.plain, None)
        found: list[Candidate] = []
        order = itertools.count()
        waiting: list[tuple[Any, int, str, Candidate, int]] = []

        def wait(stage: str, candidate: Candidate, tries: int = 0) -> None:
            heapq.heappush(waiting, (candidate.rank, next(order), stage, candidate, tries))

        for combination in self.combinations:
            wait("hoped", Candidate(self, combination, None, 0.0, self.cost(combination, None)))
        while waiting and len(found) <= runners_up:
            if not found and self.patience.is_over:
                self.gave_up = True
                break
            _, _, stage, candidate, tries = heapq.heappop(waiting)
            if candidate.cost > worth * TOO_SLOW:
                continue
            if not found and self.at_once > 1 and (asked := self._asked(stage, candidate)) is not None:
                following = heapq.nsmallest(AHEAD * self.at_once, waiting)
                self._trace_beside([asked, *self._ahead(asked, [(each[2], each[3]) for each in following])])
            if stage == "hoped":
                predicted = self._predicted(candidate.combination)
                if predicted is not None:
                    wait("rough", predicted)
            elif stage == "rough":
                predicted = candidate if found else self._refined(candidate)
                if predicted is not None:
                    wait("predicted", predicted)
            elif stage == "traced" or found:
                found += [candidate] * (stage == "traced" or candidate.peak <= self.room)
            else:
                traced = self._proved(candidate)
                if traced is not None and traced.peak <= self.room:
                    wait("traced", traced)
                elif traced is not None and tries < TRIES and (fewer := self._fewer(traced)) is not None:
                    wait("predicted", fewer, tries + 1)
        return found

    @functools.cached_property
    def combinations(self) -> Sequence[Combination]:
        """All that may be chosen."""
        every = itertools.product(*(range(len(axis.choices)) for axis in self.axes))
        return [each for each in every if not self._stores_twice(each)]

    def _stores_twice(self, combination: Combination) -> bool:
        stored = [choice.stores for choice in self.choices(combination) if choice.stores]
        return len(stored) > len(set(stored))

    def smallest(self) -> Candidate:
        """What takes least, whether it fits or not; traced."""
        predicted = []
        size = self._less
        self._trace_beside(self._every_choice())
        for combination in self.combinations:
            if self.patience.is_spent and self._known:
                break
            for tokens in {None} if self._cannot_be_cut(combination) else {None, size}:
                try:
                    predicted.append(self._candidate(combination, tokens))
                except Refused:
                    continue
        order = sorted(predicted, key=_smallest_first)
        wanted = itertools.takewhile(lambda _: not (self.patience.is_spent and self._known), order)
        proved = (each for each in map(self._proved, wanted) if each is not None)
        # The first may take more than predicted, and those behind it less.
        if list(itertools.islice(proved, TRIES)) or self._known:
            return min(self._all_traced(), key=_smallest_first)
        raise Refused(next(iter(self.refused.values()), "there are no settings to choose from"))

    def fitting(self) -> list[Candidate]:
        """All that was traced and fits, best first."""
        return sorted((each for each in self._all_traced() if each.peak <= self.room), key=lambda each: each.rank)

    def _all_traced(self) -> list[Candidate]:
        return [
            self._with_rate(Candidate(self, *key, peak_of(each.phases), self.cost(*key), each))
            for key, each in self._known.items()
        ]

    def options(self, combination: Combination) -> dict[str, Any]:
        """What a user would write."""
        return {name: value for choice in self.choices(combination) for name, value in choice.options.items()}

    def choices(self, combination: Combination) -> list[Choice]:
        """The choices of a combination."""
        return [axis.choices[number] for axis, number in zip(self.axes, combination, strict=True)]

    def budget(self, tokens: int | None) -> int | None:
        """The token budget with which a micro-batch has so many tokens."""
        return self.sizes.budget if tokens is None else tokens

    def alone(self) -> Iterator[tuple[Choice, Estimate]]:
        """Each choice by itself beside plain settings, as far as it works."""
        self._trace_beside(self._every_choice())
        for axis, name in enumerate(self.axes):
            for number in _by_themselves(name):
                if self.patience.is_spent and self._missing([(self._only(axis, number), None)]):
                    continue
                try:
                    yield name.choices[number], self.traced(self._only(axis, number), None)
                except Refused:
                    continue

    def alone_with(self, options: Collection[str]) -> Iterator[Estimate]:
        """The same, of those choices that set one of some options."""
        for axis, name in enumerate(self.axes):
            for number, choice in enumerate(name.choices):
                if choice.options.keys() & set(options):
                    with contextlib.suppress(Refused):
                        yield self.traced(self._only(axis, number), None)

    def traced(self, combination: Combination, tokens: int | None) -> Estimate:
        """What a trace says, which is made once.

        Raises:
            Refused: the settings cannot work.
        """
        key = (combination, tokens)
        if key not in self._known and key not in self.refused:
            self._take_in(key, self._tried(key))
        if key in self.refused:
            raise Refused(self.refused[key])
        return self._known[key]

    def _tried(self, key: Traced) -> Estimate | Refused:
        """What a trace says, or why there is none."""
        combination, tokens = key
        try:
            return self.measure(self.options(combination), self.budget(tokens))
        except Refused as reason:
            return reason

    def _take_in(self, key: Traced, found: Estimate | Refused) -> None:
        self.traces += 1
        if isinstance(found, Refused):
            self.refused[key] = str(found)
        else:
            self._known[key] = found

    # -- several traces at a time ---------------------------------------------------------------------------------

    def _ahead(self, asked: Traced, candidates: Sequence[tuple[str, Candidate]]) -> list[Traced]:
        """Traces to make beside one that is asked for: those that the next candidates may ask for. Of many candidates
        the first that fits is wanted, so that most of them are asked for in the end."""
        found: list[Traced] = []
        for stage, candidate in candidates:
            key = self._asked(stage, candidate, further=True)
            if key not in (None, asked, *found):
                found.append(key)  # type: ignore[arg-type]
            if len(found) == self.at_once - 1:
                break
        return found

    def _trace_beside(self, keys: Sequence[Traced]) -> None:
        """Makes traces, as many at a time as may be."""
        wanted = [each for each in keys if each not in self._known and each not in self.refused]
        if self.at_once == 1 or len(wanted) == 1:
            return  # one that is made when it is asked for
        for first in range(0, len(wanted), self.at_once):
            if self.patience.is_spent:
                return
            some = wanted[first : first + self.at_once]
            for key, found in zip(some, beside(self._tried, some), strict=True):
                if found is not None:
                    self._take_in(key, found)

    def _asked(self, stage: str, candidate: Candidate, *, further: bool = False) -> Traced | None:
        """The first trace that is wanted of a candidate in its stage and not there; with `further`, in the stages after
        it too, as far as can be told."""
        combination = candidate.combination
        if stage == "hoped":
            alone = [self._only(a, n) for a, n in enumerate(combination) if n and not self.axes[a].scales]
            wanted = [(each, None) for each in (*alone, *self._scaling(combination))]
            missing = self._missing([*wanted, (self.plain, self._less)] if further else wanted)
            if missing is not None or not further or (predicted := self._predicted(combination)) is None:
                return missing
            stage, candidate = "rough", predicted
        if stage == "rough" and candidate.tokens not in (None, self._less):
            # after which there may be other tokens
            return self._missing([(each, self._less) for each in self._scaling(combination)])
        return self._missing([(combination, candidate.tokens)]) if further or stage == "predicted" else None

    def _missing(self, wanted: Sequence[Traced]) -> Traced | None:
        """The first of some traces that is not there."""
        return next((each for each in wanted if each not in self._known and each not in self.refused), None)

    # -- predicting ---------------------------------------------------------------------------------------------

    @property
    def _less(self) -> int | None:
        """The smallest budget; None where there is nothing to cut."""
        return self.sizes.longest if self.sizes.longest < self.sizes.whole else None

    def _cannot_be_cut(self, combination: Combination) -> bool:
        return self._less is None or any(choice.whole for choice in self.choices(combination))

    def _every_choice(self) -> list[Traced]:
        """Each by itself, in one micro-batch."""
        axes = enumerate(self.axes)
        return [(self._only(place, number), None) for place, axis in axes for number in _by_themselves(axis)]

    def _only(self, axis: int, number: int) -> Combination:
        return tuple(number if each == axis else 0 for each in range(len(self.axes)))

    def _predicted(self, combination: Combination) -> Candidate | None:
        """With as many tokens as fit; None where one row does not."""
        try:
            if self._states(combination) > self.room * DOUBT:
                return None
            whole = self._candidate(combination, None)
            if whole.peak <= self.room * DOUBT:
                return whole
            if self._cannot_be_cut(combination) or (tokens := self._most_tokens(combination)) is None:
                return None
            return self._candidate(combination, tokens)
        except Refused:
            return None

    def _candidate(self, combination: Combination, tokens: int | None) -> Candidate:
        """As it is predicted from the traces of others."""
        peak = peak_of(self._bytes(combination, tokens))
        return Candidate(self, combination, tokens, peak, self.cost(combination, tokens))

    def _refined(self, candidate: Candidate) -> Candidate | None:
        """The same, once the smaller size is traced; a candidate of that size is as well traced itself."""
        if candidate.tokens is None or candidate.tokens == self._less:
            return candidate
        self._trace_less(candidate.combination)
        return self._predicted(candidate.combination)

    def _trace_less(self, combination: Combination) -> None:
        for each in self._scaling(combination):
            with contextlib.suppress(Refused):
                self.traced(each, self._less)

    def _states(self, combination: Combination) -> float:
        """The most that is held whatever the tokens and whatever becomes of activations. Where that is too much, the
        choices of the axis that scales need no traces."""
        others = tuple(0 if axis.scales else number for axis, number in zip(self.axes, combination, strict=True))
        phases = self._bytes(others, None)
        return max(sum(sizes.get(name, 0) for name in STATES) for sizes in phases.values())

    def _most_tokens(self, combination: Combination) -> int | None:
        low = self.sizes.longest
        if peak_of(self._bytes(combination, low)) > self.room * DOUBT:
            return None
        steps = range(low, self.sizes.whole, ROUND)
        fitting = _last(steps, lambda tokens: peak_of(self._bytes(combination, tokens)) <= self.room)
        return low if fitting is None else fitting // ROUND * ROUND if fitting // ROUND * ROUND >= low else low

    def _fewer(self, traced: Candidate) -> Candidate | None:
        """The same with fewer tokens, as many fewer as a trace was above the room."""
        if self._cannot_be_cut(traced.combination) or traced.tokens == self._less:
            return None
        try:
            tokens = self._tokens_below(traced)
            if tokens > self.sizes.longest:
                self._trace_less(traced.combination)
                tokens = self._tokens_below(traced)
        except Refused:
            return None
        return traced._replace(tokens=tokens, estimate=None, cost=self.cost(traced.combination, tokens))

    def _tokens_below(self, traced: Candidate) -> int:
        """Where the line from a trace to the smaller size meets the room."""
        low, now = self.sizes.longest, traced.tokens or self.sizes.whole
        least = peak_of(self._bytes(traced.combination, low))
        share = (self.room - least) / max(traced.peak - least, 1.0)
        return max(low, min(int(low + (now - low) * share), now - ROUND) // ROUND * ROUND)

    def _proved(self, candidate: Candidate) -> Candidate | None:
        try:
            found = self.traced(candidate.combination, candidate.tokens)
        except Refused:
            return None
        return self._with_rate(candidate._replace(peak=peak_of(found.phases), estimate=found))

    def _with_rate(self, candidate: Candidate) -> Candidate:
        """What is traced, with the cost that its trace says."""
        rate = None if candidate.estimate is None else candidate.estimate.tokens_per_second
        timed = all(choice.timed for choice in candidate.choices)
        return candidate if rate is None or not timed else candidate._replace(cost=1 / rate)

    def _bytes(self, combination: Combination, tokens: int | None) -> Bytes:
        """The line of what scales with the tokens, times what the other choices do in one micro-batch."""
        scaling = self._scaling(combination)
        found = _mixed([(self._line(each, tokens), weight) for each, weight in scaling.items()])
        for axis, number in enumerate(combination):
            if number and not self.axes[axis].scales:
                alone, plain = self.traced(self._only(axis, number), None), self.traced(self.plain, None)
                found = _changed(found, plain.phases, alone.phases)
        return found

    def _scaling(self, combination: Combination) -> dict[Combination, float]:
        """Its choice of the axis that scales, by itself; or the two that this lies between, each with its weight."""
        for place, axis in enumerate(self.axes):
            if axis.scales:
                return {self._only(place, each): weight for each, weight in _told_by(axis, combination[place]).items()}
        return {self.plain: 1.0}

    def _line(self, combination: Combination, tokens: int | None) -> Bytes:
        """Gradients wait where a batch is cut, however little: they are of the smaller size."""
        high = self.traced(combination, None).phases
        if tokens is None:
            return high
        low = self._at_low(combination)
        share = (tokens - self.sizes.longest) / max(self.sizes.whole - self.sizes.longest, 1)
        return {
            phase: {
                name: size if name == "gradients" else size + share * (high.get(phase, {}).get(name, 0) - size)
                for name, size in {**dict.fromkeys(high.get(phase, ()), 0), **sizes}.items()
            }
            for phase, sizes in low.items()
        }

    def _at_low(self, combination: Combination) -> Bytes:
        """The smaller size: as traced, else as the plain settings shrink to it."""
        known = self._known.get((combination, self._less))
        if known is not None:
            return known.phases
        low, plain = self.traced(self.plain, self._less).phases, self.traced(self.plain, None).phases
        if combination == self.plain:
            return low
        whole, tokens = self.traced(combination, None).phases, self.sizes.longest / self.sizes.whole

        def one(phase: str, name: str) -> float:
            least, most = low[phase].get(name, 0), plain.get(phase, {}).get(name, 0)
            if name in STATES:
                return least
            return whole.get(phase, {}).get(name, 0) * (least / most if most else tokens)

        return {
            phase: {name: one(phase, name) for name in {*sizes, *whole.get(phase, ())}} for phase, sizes in low.items()
        }

    # -- speed ---------------------------------------------------------------------------------------------------

    def cost(self, combination: Combination, tokens: int | None) -> float:
        """Seconds a token in some unit, predicted; `tokens` is the budget."""
        plain = self._known.get((self.plain, None))
        rate = plain.tokens_per_second if plain is not None else None
        whole = self.sizes.whole
        cost = (1 + MICRO_BATCH_TOKENS / whole) if rate is None else 1 / rate
        if tokens is not None:
            cost += self._overhead(rate) * (1 / tokens - 1 / whole)
        factors = (self._factor(axis, number, rate) for axis, number in enumerate(combination) if number)
        return cost * math.prod(factors)

    def _overhead(self, rate: float | None) -> float:
        """What a micro-batch costs beside its tokens."""
        if rate is None:
            return MICRO_BATCH_TOKENS
        low = self._known.get((self.plain, self._less))
        if low is None or low.tokens_per_second is None or self._less is None:
            return MICRO_BATCH_TOKENS / rate
        return max(0.0, (1 / low.tokens_per_second - 1 / rate) / (1 / self._less - 1 / self.sizes.whole))

    def _factor(self, axis: int, number: int, rate: float | None) -> float:
        if len(ends := _told_by(self.axes[axis], number)) > 1:
            return sum(weight * self._factor(axis, each, rate) for each, weight in ends.items())
        alone = self._known.get((self._only(axis, number), None))
        choice, first = self.axes[axis].choices[number], self.axes[axis].choices[0]
        if choice.timed and rate is not None and alone is not None and alone.tokens_per_second is not None:
            return rate / alone.tokens_per_second
        return choice.slower / first.slower


def _told_by(axis: Axis, number: int) -> dict[int, float]:
    """The choices whose traces tell what one of an axis does, with their weights: its own, or two around it."""
    between = axis.choices[number].between
    if between is None:
        return {number: 1.0}
    names = [choice.name for choice in axis.choices]
    return {names.index(between.few): 1 - between.share, names.index(between.many): between.share}


def _by_themselves(axis: Axis) -> list[int]:
    """The choices but the plain one that are traced to be known."""
    return [number for number, choice in enumerate(axis.choices) if number and choice.between is None]


def _mixed(found: Sequence[tuple[Bytes, float]]) -> Bytes:
    """What layers take of which a part does one thing and the rest another, by the weights of each."""
    if len(found) == 1:
        return found[0][0]
    return {
        phase: {
            name: sum(weight * each.get(phase, {}).get(name, 0) for each, weight in found)
            for name in dict.fromkeys(name for each, _ in found for name in each.get(phase, ()))
        }
        for phase in dict.fromkeys(phase for each, _ in found for phase in each)
    }


def peak_of(phases: Bytes) -> float:
    """The most bytes at a time."""
    return max((sum(each.values()) for each in phases.values()), default=0.0)


def _smallest_first(candidate: Candidate) -> tuple:
    return candidate.peak, candidate.rank


def _changed(found: Bytes, plain: Bytes, alone: Bytes) -> Bytes:
    """What was found, times what one choice by itself did to plain settings; added where there was nothing.

    What gradients and states become in a phase without any is what the most of them become.

    A choice may move the moment at which a phase holds most: that of a backward from its end, with all gradients, to
    its beginning, with all activations. The factor of a category in that phase then says nothing; that of the most of
    it, in all phases, does. So grows what a choice needs beyond plain settings: layers that are no longer fused keep
    more whether they are checkpointed or not, and buffers that stay as they are come out too small here, which the
    trace of what is chosen mends. Too large a prediction would drop what fits, with nothing to mend it.

    Nor do holes multiply: an allocator that keeps what it has taken holds them in all phases after the fullest. There
    are as many as where tensors peak, of the two that have fewer.
    """
    holes = min(_holes(found), _holes(alone))
    most_found, most_plain, most_alone = map(_most, (found, plain, alone))

    def one(phase: str, name: str, size: float) -> float:
        if name == HOLES:
            return holes
        before, after = plain.get(phase, {}).get(name, 0), alone.get(phase, {}).get(name, 0)
        if not before and not after and name in STATES:
            before, after = most_plain.get(name, 0), most_alone.get(name, 0)
        changed = size * after / before if before else size + after
        if not most_plain.get(name):
            return changed
        least = after * most_found.get(name, 0) / most_plain[name]
        return min(changed, least) if name in STATES and after else max(min(changed, size), least)

    return {
        phase: {
            name: one(phase, name, sizes.get(name, 0))
            for name in {*sizes, *plain.get(phase, ()), *alone.get(phase, ())}
        }
        for phase, sizes in found.items()
    }


def _holes(phases: Bytes) -> float:
    """Bytes that an allocator holds beside tensors when these peak."""
    return peak_of(phases) - max((sum(each.values()) - each.get(HOLES, 0) for each in phases.values()), default=0)


def _most(phases: Bytes) -> dict[str, float]:
    """The most bytes of each category."""
    most: dict[str, float] = {}
    for sizes in phases.values():
        most |= {name: size for name, size in sizes.items() if size > most.get(name, 0)}
    return most


def _last(steps: range, holds: Callable[[int], bool]) -> int | None:
    """The last step at which something holds that holds for all before it."""
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if holds(steps[middle]):
            low = middle + 1
        else:
            high = middle
    return steps[low - 1] if low else None
