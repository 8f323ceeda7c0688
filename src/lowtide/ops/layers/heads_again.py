"""Attention whose queries, keys and values are not kept for its backward, but given to it again.

What a kernel of attention keeps for backward is its inputs, its output and a number for each row. The inputs are three
products of what a layer keeps anyway: computed again they are the same, while attention itself need not run again. This
is what selective checkpointing (arXiv 2205.05198) keeps of attention, for a layer that is one autograd function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.compat.torch import storage_id


class _View(NamedTuple):
    """A tensor in the memory of one of the inputs."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Heads:
    """Queries, keys and values while they are there, and their gradients. The graph has it, and it has no graph."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = given
        self.found: list[Tensor] = []
        self.numbers = {storage_id(each.untyped_storage()): number for number, each in enumerate(given)}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        number = self.numbers.get(storage_id(tensor.untyped_storage()))
        if number is None:
            return tensor.detach()  # what attention gives would hold the graph that holds it
        return _View(number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return self.given[kept.number].as_strided(kept.size, kept.stride, kept.offset)


class HeadsAgain:
    """One call of attention.

    Args:
        attend: of queries, keys and values, differentiable.
        heads: these, [tokens, heads, dim], each contiguous in memory of its own.

    Attributes:
        out: what it gives, [tokens, heads x dim].
    """

    def __init__(self, attend: Callable[..., Tensor], heads: Sequence[Tensor]) -> None:
        self._heads = _Heads(heads)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._heads.pack, self._heads.unpack):
            self._start = heads[0].new_empty(0, requires_grad=True)
            self._graph = attend(*_Enter.apply(self._heads, self._start, *heads))
        self.out: Float[Tensor, "tokens gathered"] = self._graph.detach()
        self._heads.given = ()

    def give(self, heads: Sequence[Tensor]) -> None:
        """Queries, keys and values as they were."""
        self._heads.given = heads

    def gradients(self, slopes: Float[Tensor, "tokens gathered"]) -> list[Tensor]:
        """Those at queries, keys and values, which were given again, of that at the output."""
        torch.autograd.grad(self._graph, self._start, slopes, allow_unused=True)
        found, self._heads.given, self._heads.found = self._heads.found, (), []
        return found


class _Enter(torch.autograd.Function):
    """Queries, keys and values as results of something, so that no graph holds them; takes their gradients."""

    @staticmethod
    def forward(ctx: Any, into: _Heads, start: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.into = into
        return tuple(each.detach() for each in heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.into.found = [*grads]
        return (None,) * (2 + len(grads))
