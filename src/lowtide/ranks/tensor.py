"""Tensor parallelism: ranks that hold the same rows, and of which each has a share of every layer's matrices.

The first matrices of a block are split by their outputs and the last by their inputs, so that a rank computes its heads
and its part of the MLP with nothing to exchange between, as in Megatron-LM (arXiv 1909.08053, section 3). Hidden states
between blocks are whole and equal on all ranks. Each exchange here goes backward as Megatron's does, for a loss that
all ranks of the group compute alike: what comes back at a tensor that is equal on all ranks is its whole gradient, on
each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from lowtide.ranks.group import RankGroup

MESH = "tp"
"""The dimension of a device mesh that these ranks are in, as transformers and accelerate call it."""


@dataclass(frozen=True, eq=False)
class TensorParallel(RankGroup):
    """The ranks that the matrices of each layer are split between."""

    replicas: dist.ProcessGroup | None = None
    """Ranks that hold the same part of the weights, whose gradients are averaged; None where this one alone does, or
    where FSDP2 brings gradients together."""

    def shared(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """A tensor that is equal on all ranks, as it is, where each rank goes on with a part of the work of its own:
        in backward what they find of its gradient is added up."""
        return _Shared.apply(x, self) if torch.is_grad_enabled() and x.requires_grad else x

    def summed(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The sum over ranks, with which all of them go on alike."""
        return _Summed.apply(x, self)

    def gathered(self, x: Float[Tensor, "... own"]) -> Float[Tensor, "... all"]:
        """The columns of all ranks, with which all of them go on alike; all have equally many."""
        return _Gathered.apply(x, self)

    def own(self, x: Float[Tensor, "... all"]) -> Float[Tensor, "... own"]:
        """This rank's columns of a tensor that is equal on all ranks; `size` divides them."""
        return _Own.apply(x, self)

    def columns(self, x: Tensor) -> Tensor:
        """This rank's columns, without a gradient of its own kind: a view."""
        return x.chunk(self.size, -1)[self.rank]

    def everyones(self, x: Tensor) -> Tensor:
        """The columns of all ranks, one after the other; all have equally many."""
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return torch.cat(found, -1)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.added_up(grads[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        return ranks.added_up(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return ranks.everyones(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.columns(grads[0]).contiguous(), None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return ranks.columns(x).contiguous()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.everyones(grads[0]), None
