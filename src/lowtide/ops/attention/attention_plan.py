"""What attention over the segments of a batch depends on, apart from the tensors: who sees whom, and the rules.

An `AttentionPlan` is made once a micro-batch and shared by all layers; each backend keeps in it what it works out
from the segments. `Rules` are what a layer asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ops.attention.piece_keys import PieceKeys
from lowtide.ragged import RaggedBatch, Segment, sent

T = TypeVar("T")
NAME = "lowtide"
"""What the engine's attention function is called among those of transformers."""
PLAN = "ragged_plan"
"""The keyword argument in which a plan travels through a model's forward."""


class Sight(NamedTuple):
    """What a query sees of the keys before it; and of those after it in its segment, where that is not causal."""

    window: int | None = None
    """So many keys on either side, itself included; None for all."""
    chunk: int | None = None
    """Only keys whose position lies in the same stretch of this length (Llama 4)."""

    def within(self, keys: int) -> Sight:
        """Without the limits that so many keys never reach."""
        window = None if self.window is None or self.window >= keys else self.window
        return Sight(window, None if self.chunk is None or self.chunk >= keys else self.chunk)


class Rules(NamedTuple):
    """How queries attend to the keys that they see."""

    scale: float
    """Factor of the attention scores."""
    sight: Sight = Sight()
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)` (Gemma 2)."""
    sinks: Float[Tensor, " heads"] | None = None
    """A learned score for each head that takes its share of the softmax and gives nothing (gpt-oss)."""
    dropout: float = 0.0
    """Probability of dropping an attention weight."""
    causal: bool = True
    """Whether a query sees no key after it; otherwise it sees its whole segment, as in an encoder."""
    bias: Float[Tensor, "heads distances"] | None = None
    """Added to the scores by the distance from query to key (T5), from -(distances // 2) upwards."""


@dataclass
class AttentionPlan:
    """The segments of a batch, and what backends have worked out from them."""

    segments: tuple[Segment, ...]
    positions: Int[Tensor, " tokens"]
    others: tuple[Segment, ...] | None = None
    """Cross attention: the segments of another sequence of tokens. They are the prefixes then, and all that is seen:
    none of the keys is of a segment's own."""
    piece: PieceKeys | None = None
    """Of a piece of a long row: what earlier pieces keep for it, and it for later ones."""
    carried: int = 0
    """So many keys of earlier pieces stand behind those of the segments, and are a prefix of each."""
    _memory: dict[Hashable, object] = field(default_factory=dict)

    @classmethod
    def build(cls, batch: RaggedBatch) -> AttentionPlan:
        return cls(batch.segments, batch.position_ids, piece=batch.piece)

    @property
    def tokens(self) -> int:
        return self.segments[-1].stop

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def before(self, part: Segment) -> Segment | None:
        """The prefix of a segment, as far as the segment sees it."""
        if self.carried:
            return Segment(self.tokens, self.tokens + self.carried, -1, part.row, 0, 0)
        return part.prefix_among(self.segments if self.others is None else self.others)

    def own_keys(self, part: Segment) -> int:
        """How many tokens of a segment itself are keys."""
        return part.length if self.others is None else 0

    @property
    def key_tokens(self) -> int:
        """Tokens of the sequence that keys are of."""
        return (self.segments if self.others is None else self.others)[-1].stop + self.carried

    def behind(self, count: int) -> AttentionPlan:
        """The plan with so many keys of earlier pieces as a prefix of each segment, of which none has another."""
        assert all(part.prefix < 0 for part in self.segments)
        return self.once(("behind", count), lambda: AttentionPlan(self.segments, self.positions, carried=count))

    def keys(self, part: Segment) -> int:
        """How many keys a segment's last token sees, if nothing limits it."""
        before = self.before(part)
        return self.own_keys(part) + (before.length if before is not None else 0)

    @property
    def longest(self) -> int:
        """The most keys of any segment."""
        return self.once("longest", lambda: max(self.keys(part) for part in self.segments))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made only once for a key: all layers ask for the same."""
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]  # type: ignore[return-value]


# -- moving tokens -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """Tokens put into places, some of them in several, and the way back."""

    index: Int[Tensor, " places"]
    """For each place the token that goes there; padding repeats a token of its segment."""
    inverse: Int[Tensor, " tokens"]
    """For each token its own place."""
    shared: tuple[tuple[int, int, int], ...] = ()
    """(place, token, length) of each further copy: prefixes that stand before another segment's keys."""


class Places:
    """Collects which token goes to which place."""

    def __init__(self) -> None:
        self.count = 0
        self.spans: list[tuple[int, int, int]] = []
        self.own: list[tuple[int, int, int]] = []
        self.shared: list[tuple[int, int, int]] = []
        self.padded = False

    def share(self, part: Segment) -> None:
        """A further copy of a segment goes to the next places."""
        self.shared.append((self.count, part.start, part.length))
        self.spans.append((part.start, part.length, part.length))
        self.count += part.length

    def put_or_share(self, part: Segment) -> None:
        """A segment goes to the next places, where it may have a place already."""
        if any(start == part.start for _, start, _ in self.own):
            self.share(part)
        else:
            self.put(part, part.length)

    def skip(self, count: int, like: Segment) -> None:
        """So many places stay without a token; what is read there, of some segment, is never seen."""
        if count:
            self.spans.append((like.start, 1, count))
            self.count += count

    def put(self, part: Segment, width: int) -> None:
        """A segment goes to the next places, padded to a width."""
        self.own.append((self.count, part.start, part.length))
        self.spans.append((part.start, part.length, width))
        self.padded |= width > part.length
        self.count += width

    def gather(self, plan: AttentionPlan, tokens: int) -> Gather | None:
        """How so many tokens get to their places; None where they lie there already."""
        in_order = all(place == start for place, start, _ in self.own)
        if in_order and not self.padded and not self.shared:
            return None
        index = torch.cat([torch.arange(width).clamp_(max=n - 1).add_(start) for start, n, width in self.spans])
        inverse = torch.empty(tokens, dtype=torch.long)
        for place, start, length in self.own:
            inverse[start : start + length] = torch.arange(place, place + length)
        return Gather(sent(index, plan.device), sent(inverse, plan.device), tuple(self.shared))


def gathered(x: Tensor, gather: Gather | None) -> Tensor:
    """Tokens in their places: [tokens, ...] to [places, ...], differentiable."""
    return x if gather is None else _GatherTokens.apply(x, gather)


def scattered(x: Tensor, gather: Gather | None) -> Tensor:
    """Each token from its own place: [places, ...] to [tokens, ...], differentiable."""
    return x if gather is None else _ScatterTokens.apply(x, gather)


class _GatherTokens(torch.autograd.Function):
    """`x[index]`, whose backward gathers too: adding row by row into an index is slow on every device."""

    @staticmethod
    def forward(ctx, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.index)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        # Padding queries' outputs are dropped and padding keys are masked: their gradients are exact zeros.
        result = grad.index_select(0, ctx.gather.inverse)
        for place, token, length in ctx.gather.shared:
            result[token : token + length] += grad[place : place + length]
        return result, None


class _ScatterTokens(torch.autograd.Function):
    """Padded places back to tokens: the transpose of `_GatherTokens` without shared copies."""

    @staticmethod
    def forward(ctx, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather, ctx.places = gather, x.shape[0]
        return x.index_select(0, gather.inverse)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        result = grad.new_zeros(ctx.places, *grad.shape[1:])
        return result.index_copy_(0, ctx.gather.inverse, grad), None
