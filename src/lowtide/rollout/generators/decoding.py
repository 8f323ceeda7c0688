"""The steps of a generation, in each of which every completion gets a token: the host looks only after several.

What a step reads and writes lies on the device: the tokens, how many keys are held, what was drawn. It draws, tells
which completions have ended at a token, and moves on. So a step depends on no number of Python's, and on a GPU neither
host nor device waits for the other until the host looks. Completions that end in between are computed to the next look,
and what they write is left out; draws are keyed by completion and place, so that no token depends on when the host
looks. The idea of steps of fixed shapes and addresses is that of CUDA graphs in vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowtide.engine.forward import embedding_weight, read_next
from lowtide.ops.target import kind_of
from lowtide.ragged import sent
from lowtide.rollout.generators.cache import FEWEST, KeyStore, Line
from lowtide.rollout.generators.generator import Completion, Sampling
from lowtide.rollout.generators.plans import NextPlan
from lowtide.rollout.generators.replays import Replays
from lowtide.rollout.generators.sampling import Drawn, Streams, draw_tokens


@dataclass(frozen=True)
class Pace:
    """How often the host looks at what is written, and how long what has ended stays where it is."""

    steps: int = 1
    """From one look to the next."""
    fewest: int = FEWEST
    """Tokens that a completion's own keys have places for at first, where it may have so many."""
    until_half: bool = False
    """Completions that have ended leave when half of all have, so that shapes and addresses stay until then; and each
    completion attends to all places that there are for its keys."""
    graphs: bool = False
    """Whether steps are replayed as CUDA graphs, where they may be recorded. Off by default: no GPU has run this."""


AT_ONCE = Pace()
"""Where the host reads for nothing."""
IN_WINDOWS = Pace(steps=16, fewest=256, until_half=True)
"""Where the host waits for the device to read, and what it launches takes longer than what is computed."""
ALWAYS_SMALL = 8
"""So few completions are computed to the end, whoever has ended."""


def leave_now(ended: int, rows: int, pace: Pace) -> bool:
    """Whether completions that have ended leave."""
    left = rows - ended
    if not pace.until_half or left == 0:
        return ended > 0
    return 2 * left <= rows and rows > ALWAYS_SMALL


def pace_on(device: torch.device) -> Pace:
    """The pace on a device."""
    return IN_WINDOWS if kind_of(device) == "cuda" else AT_ONCE


@dataclass(eq=False)
class Row(Line):
    """A completion that is being written."""

    request: int = 0
    number: int = 0
    key: int = 0
    """Of its random numbers."""
    most: int = 0
    """Tokens, at most."""
    completion: Completion = field(default_factory=Completion)
    pending: list[int] = field(default_factory=list)
    """Its last tokens, whose keys are not held yet."""
    turn: int = 0
    """Where the policy's turn begins among its tokens."""
    ended: bool = False

    @property
    def replied(self) -> bool:
        """Whether tokens were returned to it that have not run yet."""
        return not self.ended and len(self.pending) > 1

    @property
    def used(self) -> list[int]:
        """Tokens that a repetition penalty counts."""
        return [*self.group.prompt, *self.completion.token_ids]


class Written(NamedTuple):
    """What the policy wrote of one completion since the host last looked."""

    tokens: list[int]
    logprobs: list[float]
    plain_logprobs: list[float]


def written(drawn: Tensor, counts: Sequence[int]) -> list[Written]:
    """What is read off numbers [3, rows, steps], of which each row has the first `counts`. Waits for the device."""
    return [
        Written([int(token) for token in tokens[:count]], logprobs[:count], plain[:count])
        for tokens, logprobs, plain, count in zip(*drawn.tolist(), counts, strict=True)
    ]


class _State(NamedTuple):
    """Numbers of each completion, [rows] each, which are the rows of one tensor."""

    token: Tensor
    """Its last one, whose keys are not held."""
    held: Tensor
    place: Tensor
    """Of its next token among its own."""
    count: Tensor
    """Tokens since the host looked."""
    key: Tensor
    prompt: Tensor
    """Tokens of its prompt."""
    shift: Tensor
    most: Tensor
    goes_on: Tensor
    """1 until it has ended, then 0."""


class Decoder:
    """Writes tokens of all completions of a store.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not.
        axes: of positions, where they are counted on several.
    """

    def __init__(self, model: nn.Module, sampling: Sampling, store: KeyStore, pace: Pace, axes: int = 0):
        self.model, self.sampling, self.store, self.pace, self.axes = model, sampling, store, pace, axes
        self.dtype = torch.promote_types(embedding_weight(model).dtype, torch.float32)
        self.never = self._on_device(sampling.never_ids) if sampling.never_ids else None
        self.stop_ids = self._on_device(sampling.stop_ids)
        self.unsettled = False
        """Whether the next token of some completion is drawn only after a look at the whole vocabulary, which the steps
        to the look after this one then take."""
        self.replied = False
        """Whether some completion has got tokens, or lost some, that no step wrote."""
        self.replays = Replays(store.device) if pace.graphs else None
        self._made_at = -1
        self._numbers = self._out = torch.empty(0)
        self._used: Tensor | None = None

    def write(self, rows: Sequence[Row]) -> list[Written]:
        """Makes the steps to the next look; what each row got, which is nothing where it had ended.

        Args:
            rows: all of the store, none of which has more than one pending token.
        """
        whole = self.unsettled
        left = max(row.most - len(row.completion.token_ids) for row in rows if not row.ended)
        steps = min(self.pace.steps, left)
        self.store.extend(steps, as_reserved=self.pace.until_half)
        self._begin(rows)
        self._make(steps, whole)
        now = _State(*self._numbers)
        missing, going_on = torch.stack([steps - now.count, now.goes_on]).tolist()
        self.unsettled = any(open and lacking for open, lacking in zip(going_on, missing, strict=True))
        return written(self._out[..., :steps], [steps - lacking for lacking in missing])

    def _make(self, steps: int, whole: bool) -> None:
        if self.replays is not None:
            self.replays.make(partial(self.step, whole), steps, changes=self.store.changes, whole=whole)
            return
        for _ in range(steps):
            self.step(whole)

    def draw(self, logits: Tensor, streams: Streams, *, look: bool, whole: bool = False) -> Tensor:
        """[3, rows] or [4, rows]: tokens, log-probabilities, plain ones, and which are settled if the host may not
        `look`."""
        drawn: Drawn = draw_tokens(logits, self.sampling, streams, look=look, whole=whole)
        # Vocabularies are below 2^24, so that a float32 holds a token.
        return torch.stack([number.to(drawn.logprobs.dtype) for number in drawn if number is not None])

    def streams(self, rows: Sequence[Row]) -> Streams:
        """What the next draws of some rows depend on, from the host's numbers."""
        keys, places = self._on_device([[row.key for row in rows], [len(row.completion.token_ids) for row in rows]])
        return Streams(keys, places, self._used_by(rows), self.never)

    # -- on the device ------------------------------------------------------------------------------------------

    def step(self, whole: bool = False) -> None:
        """Each completion that has not ended gets a token. Nothing of it waits for the host, if several are made.

        Args:
            whole: look at the whole vocabulary where cuts are not settled by the likeliest.
        """
        now = _State(*self._numbers)
        positions = now.prompt + now.held
        axes = (positions + now.shift).expand(self.axes, -1) if self.axes else None
        plan = NextPlan(self.store, positions, now.held, axes)
        streams = Streams(now.key, now.place, self._used, self.never)
        look = self.pace.steps == 1

        def read(logits: Tensor, span: slice) -> Tensor:
            return self.draw(logits, streams[span], look=look, whole=whole)

        index = torch.arange(len(now.token), device=now.token.device)
        drawn = read_next(self.model, now.token, plan, index, read)
        goes_on = now.goes_on if len(drawn) == 3 else now.goes_on * drawn[3].to(now.goes_on.dtype)
        self._move_on(now, drawn, goes_on)

    def _move_on(self, now: _State, drawn: Tensor, goes_on: Tensor) -> None:
        """Keeps what was drawn for the rows that go on, and tells which have ended with it."""
        moves = goes_on > 0
        spare = self._out.shape[-1] - 1  # takes what others would write
        column = torch.where(moves, now.count, spare)
        self._out.scatter_(2, column[None, :, None].expand(3, -1, 1), drawn[:3, :, None])
        now.token.copy_(torch.where(moves, drawn[0].to(now.token.dtype), now.token))
        if self._used is not None:
            self._used.scatter_(1, (now.prompt + now.place - (1 - goes_on))[:, None], now.token[:, None])
        self._numbers[1:4].add_(goes_on)
        stops = (now.token[:, None] == self.stop_ids).any(-1)
        now.goes_on.mul_((now.place < now.most) & ~(stops & moves))

    # -- from the host ------------------------------------------------------------------------------------------

    def _begin(self, rows: Sequence[Row]) -> None:
        """Brings the numbers to the device, to where they were before if no row came or went."""
        numbers = self._on_device(list(zip(*(self._numbers_of(row) for row in rows), strict=True)))
        changed = self._made_at != self.store.changes
        used = self._used_by(rows, most=self.store.most) if changed or self.replied else None
        self.replied = False
        if not changed:
            self._numbers.copy_(numbers)
            if self._used is not None and used is not None:
                self._used.copy_(used)
            return
        self._made_at, self._numbers, self._used = self.store.changes, numbers, used
        self._out = torch.zeros(3, len(rows), self.pace.steps + 1, dtype=self.dtype, device=self.store.device)

    def _numbers_of(self, row: Row) -> list[int]:
        place, group = len(row.completion.token_ids), row.group
        return [row.pending[0], row.held, place, 0, row.key, len(group.prompt), group.shift, row.most, not row.ended]

    def _used_by(self, rows: Sequence[Row], most: int = 0) -> Tensor | None:
        """[rows, tokens]: what a repetition penalty counts, with places for as many tokens of their own; places without
        one repeat the first."""
        if self.sampling.repetition_penalty == 1:
            return None
        width = max(max(len(row.used), len(row.group.prompt) + most) for row in rows)
        return self._on_device([used + used[:1] * (width - len(used)) for used in (row.used for row in rows)])

    def _on_device(self, numbers: Sequence[object]) -> Tensor:
        return sent(torch.tensor(numbers, dtype=torch.long), self.store.device)
