"""Sequence parallelism: ranks that hold the same batch, and of which each computes a slice of its tokens.

All of a model but its attention works token by token. Around attention an all-to-all gives each rank all tokens of some
heads in place of its own tokens of all heads, as in DeepSpeed Ulysses (arXiv 2309.14509). A rank then attends to the
whole batch, so that packed rows, shared prefixes and windows are what they are on one rank, and a slice may end
anywhere.

Every exchange goes backward as its exact transpose, for the sum of the losses of all ranks. The ranks of a group
compute the same loss, so what they add up has its gradient `size` times; the mean of gradients over all ranks, which
data parallelism takes anyway, divides by `size` again. So no gradient needs another factor.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

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

    def by_heads(self, x: Float[Tensor, "own heads dim"], tokens: int) -> Float[Tensor, "tokens own_heads dim"]:
        """This rank's heads of all tokens, from all heads of its own tokens; `size` divides the heads."""
        own, lengths = x.shape[0], self.lengths(tokens)
        for_ranks = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        return _AllToAll.apply(for_ranks, [own] * self.size, lengths, self.group)

    def by_tokens(self, x: Float[Tensor, "tokens own_heads dim"]) -> Float[Tensor, "own heads dim"]:
        """The way back of `by_heads`."""
        lengths = self.lengths(x.shape[0])
        own = lengths[self.rank]
        of_ranks = _AllToAll.apply(x, lengths, [own] * self.size, self.group)
        return of_ranks.view(self.size, own, *x.shape[1:]).transpose(0, 1).flatten(1, 2)

    def summed(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The sum over the ranks of the group."""
        return _Summed.apply(x, self)

    # -- chance ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """While it lasts, this rank draws other random numbers than the rest of its group: dropout of its tokens.

        They follow from the state of the generators before, so that a repeated step draws them again.
        """
        seed = int(torch.randint(1 << 62, ()))
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed + self.rank)
            yield


class _AllToAll(torch.autograd.Function):
    """Sends `sent[r]` places to rank r and takes `taken[r]` from it; backward sends them back."""

    @staticmethod
    def forward(ctx, x: Tensor, sent: Sequence[int], taken: Sequence[int], group: Any) -> Tensor:
        ctx.sent, ctx.taken, ctx.group = sent, taken, group
        return _exchanged(x, sent, taken, group)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.taken, ctx.sent, ctx.group), None, None, None


def _exchanged(x: Tensor, sent: Sequence[int], taken: Sequence[int], group: Any) -> Tensor:
    found = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), list(taken), list(sent), group)
    return found


class _Summed(torch.autograd.Function):
    """Adds up over ranks. Each rank's loss depends on what this one gives, all of them alike."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: SequenceParallel) -> Tensor:
        ctx.size = ranks.size
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None
