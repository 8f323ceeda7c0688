"""The plan of a batch whose tokens are split over ranks (`ranks.sequence`): their attention, their recurrences and
short convolutions, and their scores.

Each rank runs the model on its slice of the tokens and reads the scores whose hidden states lie there. What was read is
put together again, so that every rank has the statistics of all scores and computes the loss of the whole batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from lowtide.engine.heads.head import Head, ScoreOutput, Scores
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.chained_attention import chained_attention
from lowtide.ops.attention.piece_keys import PieceKeys
from lowtide.ops.attention.varlen_attention import AttentionRules, in_autocast, varlen_attention
from lowtide.ops.logits.logit_rows import Named
from lowtide.ops.recurrence.chained_recurrence import chained_convolution, chained_recurrence
from lowtide.ops.recurrence.recurrence import Recurrence
from lowtide.ranks.sequence import SequenceParallel


@dataclass(frozen=True)
class SharedHeads:
    """How ranks share out attention heads that their number may not divide.

    Key heads are repeated, and so many heads of zeros are added that each rank has as many as the others. They get no
    weight in what is kept, so that numbers and gradients are those of the model's own heads.
    """

    query: int
    """Query heads of the layer."""
    key: int
    """Key and value heads of the layer."""
    repeat: int
    """How often each key head is taken, with its share of its query heads."""
    group: int
    """Query heads of each of these, those of zeros among them."""
    more: int
    """Key heads of zeros behind them, each with a group of its own."""
    ranks: int

    @classmethod
    @functools.cache
    def of(cls, query: int, key: int, ranks: int) -> SharedHeads:
        """With as few query heads as there can be, and of these with as few key heads."""
        ways = []
        for repeat in (each for each in range(1, query // key + 1) if query // key % each == 0):
            keys, group = key * repeat, query // key // repeat
            longer = next(each for each in itertools.count(group) if keys * each % ranks == 0)
            more = next(each for each in itertools.count() if (keys + each) * group % ranks == 0)
            ways += [cls(query, key, repeat, longer, 0, ranks), cls(query, key, repeat, group, more, ranks)]
        return min(ways, key=lambda way: (way.queries, way.keys))

    @property
    def queries(self) -> int:
        """Query heads of all ranks together, those of zeros among them."""
        return (self.key * self.repeat + self.more) * self.group

    @property
    def keys(self) -> int:
        """Key heads that are sent."""
        return math.lcm(self.key * self.repeat + self.more, self.ranks)

    def laid_out(self, x: Float[Tensor, "tokens query ..."]) -> Float[Tensor, "tokens queries ..."]:
        """Query heads, each group of them with its zeros."""
        if self.queries == self.query:
            return x
        groups = x.unflatten(1, (self.key * self.repeat, -1))
        after = (0, 0) * (x.ndim - 2)
        return F.pad(groups, (*after, 0, self.group - groups.shape[2], 0, self.more)).flatten(1, 2)

    def laid_out_keys(self, x: Float[Tensor, "tokens key ..."]) -> Float[Tensor, "tokens keys ..."]:
        """Key or value heads: repeated, with those of zeros behind them, and again until each rank has some."""
        x = _repeated(x, self.repeat)
        if self.more:
            x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, self.more))
        return _repeated(x, self.keys // x.shape[1])

    def kept(self, x: Float[Tensor, "tokens queries ..."]) -> Float[Tensor, "tokens query ..."]:
        """The way back of `laid_out`."""
        if self.queries == self.query:
            return x
        keys = self.key * self.repeat
        return x.unflatten(1, (-1, self.group))[:, :keys, : self.query // keys].flatten(1, 2)

    def __str__(self) -> str:
        """What ranks do beyond sharing out; empty where there is nothing of it."""
        said = []
        if self.queries > self.query:
            said.append(f"{self.query} attention heads are computed as {self.queries}")
        if (times := self.keys // self.key) > 1:
            said.append(f"each of {self.key} key and value heads is sent {times} times")
        return " and ".join(said)


@dataclass(frozen=True)
class _Heads:
    """How a layer's heads get to their ranks, and what each rank has computed of its own back to all."""

    plan: SplitPlan
    shared: SharedHeads

    def own(self, x: Shaped[Tensor, "run heads ..."]) -> Shaped[Tensor, "tokens own_heads ..."]:
        """This rank's heads of all tokens, from all heads of its own tokens."""
        return self._exchanged(self.shared.laid_out(self._of_own(x)))

    def own_keys(self, x: Shaped[Tensor, "run keys ..."]) -> Shaped[Tensor, "tokens own_keys ..."]:
        """The same of what groups of heads share."""
        return self._exchanged(self.shared.laid_out_keys(self._of_own(x)))

    def own_weights(self, x: Shaped[Tensor, "heads ..."]) -> Shaped[Tensor, "own_heads ..."]:
        """This rank's heads of what all tokens have alike."""
        exchange = self.plan.sequence
        return self.shared.laid_out(x[None])[0].chunk(exchange.size)[exchange.rank]

    def back(self, x: Shaped[Tensor, "tokens own_heads ..."]) -> Shaped[Tensor, "run heads ..."]:
        """All heads of the tokens that this rank runs; zero at a token that it runs for want of one of its own."""
        found = self.shared.kept(self.plan.sequence.by_tokens(x))
        missing = (self.plan.runs.stop - self.plan.runs.start) - found.shape[0]
        return torch.cat([found, found.new_zeros(missing, *found.shape[1:])]) if missing else found

    def _of_own(self, x: Tensor) -> Tensor:
        return x[: self.plan.own.stop - self.plan.own.start]

    def _exchanged(self, x: Tensor) -> Tensor:
        return self.plan.sequence.by_heads(x, self.plan.whole.tokens)


def _repeated(x: Float[Tensor, "tokens heads ..."], times: int) -> Tensor:
    return x if times == 1 else x.repeat_interleave(times, dim=1)


@dataclass(frozen=True)
class SplitPlan:
    """An `AttentionPlan` of all tokens, of which this rank has a slice."""

    whole: AttentionPlan
    sequence: SequenceParallel
    shared: set[SharedHeads] = field(default_factory=set)
    """How the heads of the layers that attended were shared out."""

    @property
    def own(self) -> slice:
        """This rank's tokens."""
        return self.sequence.own(self.whole.tokens)

    @property
    def runs(self) -> slice:
        """The tokens that this rank runs: its own, or one where it has none."""
        return self.sequence.runs(self.whole.tokens)

    @functools.cached_property
    def positions(self) -> Int[Tensor, " run"]:
        return self.whole.positions[self.runs]

    @property
    def piece(self) -> PieceKeys | None:
        """Of a piece of a long row: a layer keeps the keys of this rank's heads, of all tokens."""
        return self.whole.piece

    def attend(
        self,
        layer: Hashable,
        query: Float[Tensor, "run heads dim"],
        key: Float[Tensor, "run kv_heads dim"],
        value: Float[Tensor, "run kv_heads value_dim"],
        asked: AttentionRules,
    ) -> Float[Tensor, "run heads value_dim"]:
        """`varlen_attention` over all tokens, or `chained_attention` of a piece, each rank for its heads.

        Args:
            layer: tells the layers of a model apart.
        """
        heads = _Heads(self, SharedHeads.of(query.shape[1], key.shape[1], self.sequence.size))
        self.shared.add(heads.shared)
        query, key, value = in_autocast(query, key, value)
        query, key, value = heads.own(query), heads.own_keys(key), heads.own_keys(value)
        if (sinks := asked.get("sinks")) is not None:
            asked = {**asked, "sinks": heads.own_weights(sinks)}
        if self.piece is None:
            return heads.back(varlen_attention(query, key, value, self.whole, **asked))
        return heads.back(chained_attention(layer, query, key, value, self.whole, **asked))

    def recur(self, layer: Hashable, recurrence: Recurrence, chunk: int) -> Float[Tensor, "run ..."]:
        """`chained_recurrence` over all tokens, each rank for its heads; so no rank waits for another's states.

        Args:
            layer: tells the recurrences of a model apart.
            chunk: tokens of a chunk.
        """
        heads = _Heads(self, SharedHeads.of(*recurrence.heads, self.sequence.size))
        own = recurrence.mapped(heads.own, heads.own_keys, heads.own_weights)
        return heads.back(chained_recurrence(layer, own, self.whole, chunk))

    def convolve(
        self, layer: Hashable, x: Float[Tensor, "run channels"], weight: Float[Tensor, "channels taps"]
    ) -> Float[Tensor, "run channels"]:
        """`chained_convolution` over all tokens, each rank for its channels.

        Args:
            layer: tells the convolutions of a model apart.
            weight: the last tap is the token's own.
        """
        heads = _Heads(self, SharedHeads.of(x.shape[1], x.shape[1], self.sequence.size))
        return heads.back(chained_convolution(layer, heads.own(x), heads.own_weights(weight), self.whole))

    # -- scores ------------------------------------------------------------------------------------------------------

    def scored(self, scores: Scores, read: Callable[[Scores], ScoreOutput], head: type[Head]) -> ScoreOutput:
        """What a head gives for all scores, each of them read on the rank that has its hidden state.

        Args:
            scores: with places among all tokens.
            read: from scores with places among this rank's tokens to what the head gives.
            head: that does.
        """
        place, own = self.held(scores)
        # A loss that is added up over ranks has its gradient once for each (`SequenceParallel.summed`).
        found = read(replace(own, grad_scale=scores.grad_scale * self.sequence.size))
        if found.stays and not scores.placed:
            return found
        stats = dict(found.stats)
        for name, value in found.stats.items():
            if found.stays:
                stats[name] = value.new_zeros(len(scores.index), *value.shape[1:]).index_copy(0, place, value)
            elif name in head.of_tokens:
                (stats[name],) = self.of_all_tokens([value])
            elif name not in head.of_all_scores:
                stats[name] = self._placed(value, place, len(scores.index))
        return ScoreOutput(None if found.loss is None else self.sequence.summed(found.loss), stats)

    def held(self, scores: Scores) -> tuple[Int[Tensor, " held"], Scores]:
        """The numbers of the scores whose hidden states this rank has, and these with places among its own tokens."""
        place = self.sequence.held(scores.index, self.whole.tokens)
        teacher = scores.teacher
        numbers: dict[str, Any] = {name: getattr(scores, name) for name in ("draws", "weights", "old")}
        numbers = {name: None if each is None else each[place] for name, each in numbers.items()}
        if teacher is not None and len(teacher.states) == len(scores.index):
            teacher = replace(teacher, states=teacher.states[place])
        if scores.named is not None:
            numbers["named"] = Named(*(each[place] for each in scores.named))
        index, target = scores.index[place] - self.own.start, scores.target[place]
        return place, replace(scores, index=index, target=target, teacher=teacher, **numbers)

    def of_all_tokens(self, values: Sequence[Shaped[Tensor, "run ..."]]) -> tuple[Shaped[Tensor, "tokens ..."], ...]:
        """Numbers at all tokens, of several kinds, from those at this rank's."""
        own = torch.arange(self.own.start, self.own.stop, device=self.whole.device)
        return tuple(self._placed(each[: len(own)], own, self.whole.tokens) for each in values)

    def _placed(self, values: Tensor, place: Tensor, count: int) -> Tensor:
        """[count, ..]: the values of all ranks in their places, each of which is one rank's."""
        numbers = values.float() if values.dtype == torch.bool else values
        whole = numbers.new_zeros(count, *numbers.shape[1:]).index_copy(0, place, numbers)
        return self.sequence.summed(whole).to(values.dtype)
