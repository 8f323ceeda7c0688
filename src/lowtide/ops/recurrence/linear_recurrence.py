"""A linear recurrence of given tokens, by what computes it fastest: kernels of fla (flash-linear-attention,
github.com/fla-org) on a GPU, else by `chunked`.

fla's kernels take sequences of unequal length end to end, and the state that each starts from, with gradients of both.
So segments are cut where others go on from them, and the parts are computed in rounds: first those that nothing stands
before, then those that go on from them, and so on. Rows without prefixes are one round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan, Gather, Places, gathered, scattered
from lowtide.ops.installed_kernels import Kernel, serving, values_and_gradients
from lowtide.ops.recurrence.chunked import linear_recurrence, recurrence_step
from lowtide.ops.recurrence.layout import RecurrenceLayout, cuts_of, on_device
from lowtide.ops.recurrence.recurrence import Laying
from lowtide.ragged import RaggedBatch, sent

PACKAGE = "flash-linear-attention"
DELTA_RULE = Kernel(PACKAGE, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
DELTA_RULE_BY_CHANNEL = Kernel(PACKAGE, "fla.ops.kda", "chunk_kda")
ADDING = Kernel(PACKAGE, "fla.ops.simple_gla", "chunk_simple_gla")
"""Without `beta`: Mamba-2 and lightning attention."""


@dataclass(frozen=True)
class LinearRecurrence:
    """`chunked.linear_recurrence` of given tokens, [tokens, heads, ...] each; see there."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor | None

    @property
    def like(self) -> Tensor:
        return self.value

    def over(
        self, plan: AttentionPlan, chunk: int, initial: Tensor | None = None, *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        kernel = self._kernel()
        if kernel is None:
            return _plainly(self, plan, chunk, initial, final)
        return _in_rounds(kernel, self, plan, initial, final)

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence_step(self.query, self.key, self.value, self.log_decay, self.beta, state)

    @property
    def heads(self) -> tuple[int, int]:
        return self.value.shape[1], self.key.shape[1]

    def mapped(self, heads: Laying, keys: Laying, weights: Laying) -> LinearRecurrence:
        beta = None if self.beta is None else heads(self.beta)
        return LinearRecurrence(keys(self.query), keys(self.key), heads(self.value), heads(self.log_decay), beta)

    @property
    def narrow(self) -> torch.dtype:
        """What the layer computes in: of keys and values one may be in float32 already."""
        return min(self.key.dtype, self.value.dtype, key=lambda dtype: dtype.itemsize)

    def _kernel(self) -> Callable[..., Any] | None:
        """The one of fla's that serves; None where none does."""
        by_channel = self.log_decay.ndim == 3
        kernel = ADDING if self.beta is None else DELTA_RULE_BY_CHANNEL if by_channel else DELTA_RULE
        widths = (*self.heads, self.key.shape[2], self.value.shape[2])
        return serving(kernel, self.value, self.narrow, widths, self._beside_the_operation)

    def _beside_the_operation(self, kernel: Callable[..., Any]) -> list[tuple[Tensor, Tensor]]:
        """What a kernel and `linear_recurrence` compute of random inputs like these, with some that go on from parts of
        others, longer and shorter than a chunk."""
        device, draws = self.value.device, torch.Generator().manual_seed(0)
        rows = [[1] * length for length in (70, 40, 20, 130)]
        plan = AttentionPlan.build(
            RaggedBatch.from_segments(rows, prefix=[-1, (0, 33), 0, -1], row=[0, 0, 0, 1]).to(device)
        )

        def drawn(shape: torch.Size, dtype: torch.dtype = self.narrow) -> Tensor:
            return torch.randn(plan.tokens, *shape[1:], generator=draws).to(device, dtype)

        width = self.key.shape[2]
        query, key, value = (drawn(each.shape) for each in (self.query, self.key, self.value))
        decay = -drawn(self.log_decay.shape, torch.float32).sigmoid() / 4
        beta = None if self.beta is None else drawn(self.beta.shape).sigmoid()
        states = torch.randn(len(rows), self.heads[0], width, self.value.shape[2], generator=draws).to(device)
        given = (query / width**0.5, key / width**0.5, value, decay, beta, states)

        def by_kernel(*inputs: Any) -> tuple[Tensor, Tensor]:
            return _both(_in_rounds(kernel, LinearRecurrence(*inputs[:5]), plan, inputs[5], True))

        def plainly(*inputs: Any) -> tuple[Tensor, Tensor]:
            return _both(_plainly(LinearRecurrence(*inputs[:5]), plan, 16, inputs[5], True))

        return [*zip(values_and_gradients(by_kernel, given), values_and_gradients(plainly, given), strict=True)]


def _plainly(
    given: LinearRecurrence, plan: AttentionPlan, chunk: int, initial: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    layout, rates = RecurrenceLayout.of(plan, chunk), (given.log_decay, given.beta)
    return linear_recurrence(given.query, given.key, given.value, *rates, layout, initial, final=final)


def _both(found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    out, states = found
    assert states is not None
    return out, states


class _Round(NamedTuple):
    """Parts of segments that are computed together."""

    tokens: int
    starts: Int[Tensor, " parts+1"]
    """Where each part starts and ends."""
    after: Int[Tensor, " parts"]
    """What each goes on from: of the first round, the segment that it begins, whose initial state it has; of later
    rounds, a part of the rounds before."""


@dataclass(frozen=True)
class _Rounds:
    """In which order the tokens of a plan are computed by kernels that take sequences and the states before them."""

    gather: Gather | None
    rounds: tuple[_Round, ...]
    last: Int[Tensor, " segments"]
    """Of each segment its last part, among those of all rounds."""

    @classmethod
    def of(cls, plan: AttentionPlan) -> _Rounds:
        return plan.once("rounds of a recurrence", lambda: cls._build(plan))

    @classmethod
    def _build(cls, plan: AttentionPlan) -> _Rounds:
        before = [part.after(plan.segments) for part in plan.segments]
        cuts = cuts_of(plan.segments, before)
        rounds: list[list[tuple[int, int, int]]] = []  # (segment, first token of it, last)
        depth: dict[tuple[int, int], int] = {}  # (segment, tokens) -> the round whose part ends there
        for number, part in enumerate(plan.segments):
            bounds = sorted({0, part.length, *cuts[number]})
            first = depth[part.prefix, before[number]] + 1 if before[number] else 0
            for later, (low, high) in enumerate(pairwise(bounds), first):
                depth[number, high] = later
                rounds += [[] for _ in range(later + 1 - len(rounds))]
                rounds[later].append((number, low, high))
        places, ended, made = Places(), dict[tuple[int, int], int](), list[_Round]()
        for parts in rounds:
            after = [
                (number, low) if low else (plan.segments[number].prefix, before[number]) for number, low, _ in parts
            ]
            begun = [number for number, _, _ in parts] if not made else [ended[each] for each in after]
            for number, low, high in parts:
                whole = plan.segments[number]
                places.put(whole._replace(start=whole.start + low, stop=whole.start + high), high - low)
                ended[number, high] = len(ended)
            lengths = torch.tensor([0, *(high - low for _, low, high in parts)])
            starts = sent(lengths.cumsum(0), plan.device)
            made.append(_Round(int(lengths.sum()), starts, on_device(begun, plan.device)))
        last = [ended[number, part.length] for number, part in enumerate(plan.segments)]
        return cls(places.gather(plan, plan.tokens), tuple(made), on_device(last, plan.device))


def _in_rounds(
    kernel: Callable[..., Any], given: LinearRecurrence, plan: AttentionPlan, initial: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """`linear_recurrence` by a kernel of fla's."""
    order, dtype, shared = _Rounds.of(plan), given.narrow, given.heads[0] // given.heads[1]
    counts = [each.tokens for each in order.rounds]

    def laid(x: Tensor, dtype: torch.dtype = dtype) -> tuple[Tensor, ...]:
        return gathered(x.to(dtype), order.gather)[None].split(counts, 1)

    inputs = {
        "q": laid(given.query.repeat_interleave(shared, 1)),
        "k": laid(given.key.repeat_interleave(shared, 1)),
        "v": laid(given.value),
        "g": laid(given.log_decay, torch.float32),
        **({} if given.beta is None else {"beta": laid(given.beta)}),
    }
    outs: list[Tensor] = []
    states: list[Tensor] = []
    for number, each in enumerate(order.rounds):
        before = torch.cat(states) if number else None if initial is None else initial.float()
        start = None if before is None else before.index_select(0, each.after)
        out, after = kernel(
            **{name: parts[number] for name, parts in inputs.items()},
            scale=1.0,
            initial_state=start,
            output_final_state=final or number + 1 < len(order.rounds),
            cu_seqlens=each.starts,
        )
        outs.append(out[0])
        states += [] if after is None else [after]
    finals = torch.cat(states).index_select(0, order.last) if final else None
    return scattered(torch.cat(outs), order.gather), finals
