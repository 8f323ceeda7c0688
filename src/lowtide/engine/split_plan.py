"""The plan of a batch whose tokens are split over ranks (`ranks.sequence`): their attention and their scores.

Each rank runs the model on its slice of the tokens and reads the scores whose hidden states lie there. What was read is
put together again, so that every rank has the statistics of all scores and computes the loss of the whole batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.ops.attention_plan import AttentionPlan
from lowtide.ops.chained_attention import chained_attention
from lowtide.ops.piece_keys import PieceKeys
from lowtide.ops.varlen_attention import AttentionRules, in_autocast, varlen_attention
from lowtide.ranks.sequence import SequenceParallel


@dataclass(frozen=True)
class SplitPlan:
    """An `AttentionPlan` of all tokens, of which this rank has a slice."""

    whole: AttentionPlan
    sequence: SequenceParallel
    copied: dict[int, int] = field(default_factory=dict)
    """By the number of key and value heads of a layer, how often each was repeated."""

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

        Key and value heads are repeated until they divide by the ranks.

        Args:
            layer: tells the layers of a model apart.

        Raises:
            ValueError: the query heads do not; names heads and ranks.
        """
        exchange, tokens, (run, heads, _) = self.sequence, self.whole.tokens, query.shape
        if heads % exchange.size:
            raise ValueError(
                f"{heads} attention heads cannot be shared out among {exchange.size} ranks that split sequences: take "
                f"a divisor of {heads}"
            )
        kv_heads, own = key.shape[1], self.own.stop - self.own.start
        repeat = self.copied[kv_heads] = math.lcm(kv_heads, exchange.size) // kv_heads
        query, key, value = (x[:own] for x in in_autocast(query, key, value))
        key, value = (x if repeat == 1 else x.repeat_interleave(repeat, dim=1) for x in (key, value))
        sinks = asked.get("sinks")
        if sinks is not None:
            asked = {**asked, "sinks": sinks.chunk(exchange.size)[exchange.rank]}
        query, key, value = (exchange.by_heads(x, tokens) for x in (query, key, value))
        if self.piece is None:
            of_heads = varlen_attention(query, key, value, self.whole, **asked)
        else:
            of_heads = chained_attention(layer, query, key, value, self.whole, **asked)
        found = exchange.by_tokens(of_heads)
        return found if own == run else torch.cat([found, found.new_zeros(run - own, *found.shape[1:])])

    # -- scores ------------------------------------------------------------------------------------------------------

    def scored(self, scores: Scores, read: Callable[[Scores], ScoreOutput]) -> ScoreOutput:
        """What a head gives for all scores, each of them read on the rank that has its hidden state.

        Args:
            scores: with places among all tokens.
            read: from scores with places among this rank's tokens to what the head gives.
        """
        place = self.sequence.held(scores.index, self.whole.tokens)
        index, target = scores.index[place] - self.own.start, scores.target[place]
        # A loss that is added up over ranks has its gradient once for each (`SequenceParallel.summed`).
        found = read(replace(scores, index=index, target=target, grad_scale=scores.grad_scale * self.sequence.size))
        if found.stays:
            return found
        for name, value in list(found.items()):
            whole = self.sequence.summed(value) if name == "loss" else self._placed(value, place, len(scores.index))
            found[name] = whole
        return found

    def of_all_tokens(self, values: Sequence[Float[Tensor, "run size"]]) -> tuple[Float[Tensor, "tokens size"], ...]:
        """Numbers at all tokens, a tensor for each layer, from those at this rank's."""
        own = torch.arange(self.own.start, self.own.stop, device=self.whole.device)
        return tuple(self._placed(each[: len(own)], own, self.whole.tokens) for each in values)

    def _placed(self, values: Tensor, place: Tensor, count: int) -> Tensor:
        """[count, ..]: the values of all ranks in their places, each of which is one rank's."""
        numbers = values.float() if values.dtype == torch.bool else values
        whole = numbers.new_zeros(count, *numbers.shape[1:]).index_copy(0, place, numbers)
        return self.sequence.summed(whole).to(values.dtype)
