"""Sequence parallelism: ranks that hold the same batch, and of which each computes a slice of its tokens.

All of a model but its attention, its recurrences and its short convolutions works token by token. Around these an
all-to-all gives each rank all tokens of some heads (or channels) in place of its own tokens of all heads, as in
DeepSpeed Ulysses (arXiv 2309.14509). A rank then has the whole batch before it, so that packed rows, shared prefixes,
windows and states are what they are on one rank, and a slice may end anywhere.

Every exchange goes backward as its exact transpose, for the sum of the losses of all ranks. The ranks of a group
compute the same loss, so what they add up has its gradient `size` times; the mean of gradients over all ranks, which
data parallelism takes anyway, divides by `size` again. So no gradient needs another factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lowtide.compat.gloo import exchange_between_ranks
from lowtide.ranks.group import RankGroup


@dataclass(frozen=True, eq=False)
class SequenceParallel(RankGroup):
    """The ranks that split the tokens of a batch; those of one group hold the same batch."""

    @classmethod
    def of_size(cls, size: int) -> SequenceParallel:
        """Groups of so many neighbouring ranks, and of them this rank's; all ranks call it together.

        Raises:
            ValueError: the number of ranks is no multiple of it.
        """
        ranks = dist.get_world_size()
        if size < 1 or ranks % size:
            raise ValueError(f"{ranks} ranks cannot be put into groups of {size}: take a divisor of {ranks}")
        group, _ = dist.new_subgroups(size)
        return cls(cast(dist.ProcessGroup, group))

    def lengths(self, tokens: int) -> list[int]:
        """How many of so many tokens each rank has; some have none where tokens are fewer than ranks."""
        ends = [tokens * number // self.size for number in range(self.size + 1)]
        return [stop - start for start, stop in itertools.pairwise(ends)]

    def own(self, tokens: int) -> slice:
        """This rank's slice of so many tokens."""
        return slice(tokens * self.rank // self.size, tokens * (self.rank + 1) // self.size)

    def runs(self, tokens: int) -> slice:
        """What this rank puts through the model: its own tokens, or where it has none the first of all, since models
        need one; nobody sees what comes of that."""
        own = self.own(tokens)
        return own if own.stop > own.start else slice(0, 1)

    # -- exchanges, all differentiable -------------------------------------------------------------------------------

    def by_heads(self, x: Float[Tensor, "own heads ..."], tokens: int) -> Float[Tensor, "tokens own_heads ..."]:
        """This rank's heads of all tokens, from all heads of its own tokens; `size` divides the heads."""
        own, lengths = x.shape[0], self.lengths(tokens)
        for_ranks = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        return _AllToAll.apply(for_ranks, [own] * self.size, lengths, self)

    def by_tokens(self, x: Float[Tensor, "tokens own_heads ..."]) -> Float[Tensor, "own heads ..."]:
        """The way back of `by_heads`."""
        lengths = self.lengths(x.shape[0])
        own = lengths[self.rank]
        of_ranks = _AllToAll.apply(x, lengths, [own] * self.size, self)
        return of_ranks.view(self.size, own, *x.shape[1:]).transpose(0, 1).flatten(1, 2)

    def summed(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The sum over the ranks of the group."""
        return _Summed.apply(x, self)

    # -- what the exchanges are made of ------------------------------------------------------------------------------

    def sent(self, x: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """What comes back where `sent[r]` places of `x` go to rank r, and `taken[r]` come from it."""
        found = x.new_empty(sum(taken), *x.shape[1:])
        exchange_between_ranks(found, x, taken, sent, self.group)
        return found

    def held(self, index: Int[Tensor, " scores"], tokens: int) -> Int[Tensor, " held"]:
        """Which of some places among all tokens are in this rank's slice, by their numbers."""
        own = self.own(tokens)
        return torch.nonzero((index >= own.start) & (index < own.stop)).flatten()


class _AllToAll(torch.autograd.Function):
    """Sends `sent[r]` places to rank r and takes `taken[r]` from it; backward sends them back."""

    @staticmethod
    def forward(ctx, x: Tensor, sent: Sequence[int], taken: Sequence[int], ranks: SequenceParallel) -> Tensor:
        ctx.sent, ctx.taken, ctx.ranks = sent, taken, ranks
        return ranks.sent(x, sent, taken)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks.sent(grads[0], ctx.taken, ctx.sent), None, None, None


class _Summed(torch.autograd.Function):
    """Adds up over ranks. Each rank's loss depends on what this one gives, all of them alike."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: SequenceParallel) -> Tensor:
        ctx.size = ranks.size
        return ranks.added_up(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None
