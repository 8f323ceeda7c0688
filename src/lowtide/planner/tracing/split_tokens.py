"""One rank of those that split the tokens of a batch, in a trace: its own slice runs, and what it sends is counted.

The others are not there. What they would send has no memory either, so empty tensors of its size stand for it, and the
trace holds what the exchange holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lowtide.ranks.sequence import SequenceParallel


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedSlice(SequenceParallel):
    """The first of so many ranks."""

    ranks: int
    """Of the group."""
    count: Callable[[int], None]
    """Told the bytes that this rank sends to others, each time."""

    @functools.cached_property
    def size(self) -> int:
        return self.ranks

    @functools.cached_property
    def rank(self) -> int:
        return 0

    def sent(self, x: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        x = x.contiguous()
        self.count(x.numel() * x.itemsize * (self.size - 1) // self.size)
        return x.new_empty(sum(taken), *x.shape[1:])

    def add_up(self, total: Tensor) -> None:
        self.count(2 * total.numel() * total.itemsize * (self.size - 1) // self.size)

    def held(self, index: Int[Tensor, " scores"], tokens: int) -> Int[Tensor, " held"]:
        """As many as an equal share of them is: where they are is not known."""
        return torch.arange(-(-len(index) // self.size), device=index.device)
