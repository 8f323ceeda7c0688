"""What the pieces of a long row keep for later ones, layer by layer, and the gradients that later ones leave there.

A row above the token budget is a tree of pieces (`step_plan`). Each piece is a batch of its own, whose layers see
what earlier pieces kept: keys and values of all their tokens, of their last ones where a layer has a sliding window, or
the last inputs of a short convolution. Earlier tensors are handles here, never tensors that autograd saves. So nothing
of an earlier piece is a part of the graph of a later one: its gradient is added up here, at least in float32, and the
earlier piece's own backward takes it in.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class KeyPlace(Protocol):
    """Where the tensors wait that pieces keep."""

    def keep(self, tensor: Tensor) -> Any:
        """Takes a tensor, which nobody writes to any more; what is returned stands for it."""
        ...

    def read(self, kept: Any) -> Tensor:
        """The tensor, on its device."""
        ...

    def free(self, kept: Any) -> None:
        """The tensor is not wanted any more."""
        ...


class OnDevice:
    """Tensors stay where they are, without the rest of a storage that they are a part of."""

    def keep(self, tensor: Tensor) -> Tensor:
        return compact(tensor)

    def read(self, kept: Tensor) -> Tensor:
        return kept

    def free(self, kept: Tensor) -> None:
        """It goes with the last that holds it."""


def compact(tensor: Tensor) -> Tensor:
    """The tensor without gradient, in a storage of its own size."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@dataclass
class _Kept:
    """What a layer keeps of one piece."""

    values: list[Any]
    gradients: list[Any] | None = None


@dataclass(eq=False)
class PieceKeys:
    """One piece of a long row: its place among the others, and what its layers keep for later ones."""

    tokens: int
    """Of each of its segments at most; of its only one, where other pieces go on from it."""
    before: PieceKeys | None = None
    """The piece that it goes on from."""
    row_tokens: int = 0
    """The longest way through the row, over a prompt and its longest completion."""
    way_tokens: int = 0
    """The longest way through the row that leads over this piece."""
    keeps: bool = False
    """Whether other pieces go on from it."""
    place: KeyPlace = field(default_factory=OnDevice)
    records: bool = False
    """Whether layers keep what they compute now, as in the pass that comes before those with gradients."""
    _layers: dict[Hashable, _Kept] = field(default_factory=dict)
    _shared: dict[Hashable, Hashable] = field(default_factory=dict)
    _given: list[tuple[weakref.ref[Tensor], Hashable]] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Tokens of the row before it."""
        return 0 if self.before is None else self.before.start + self.before.tokens

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, layers keep what they compute, if other pieces go on from this one."""
        self.records = self.keeps
        try:
            yield
        finally:
            self.records = False
            self._given.clear()

    # -- what is kept ------------------------------------------------------------------------------------------------

    def meet(self, layer: Hashable, key: Tensor) -> None:
        """Notices that a layer is given the keys of another one, while layers keep what they compute: what is kept of
        these is the first one's.

        Args:
            key: as the layer was given it, before any view of it was made.
        """
        if self.records:
            first = next((first for given, first in self._given if given() is key), None)
            if first is None:
                self._given.append((weakref.ref(key), layer))
            else:
                self._shared[layer] = first

    def is_shared(self, layer: Hashable) -> bool:
        """Whether a layer is given the keys of another one, which keeps them."""
        return layer in self._shared

    def _of(self, layer: Hashable) -> _Kept:
        return self._layers[self._shared.get(layer, layer)]

    def keep(self, layer: Hashable, tensors: Sequence[Tensor]) -> None:
        """Keeps tensors [tokens, ...] of a layer."""
        assert layer not in self._layers, "a layer keeps what it computes once a piece"
        self._layers[layer] = _Kept([self.place.keep(each) for each in tensors])

    def read(self, layer: Hashable) -> list[Tensor]:
        """What a layer keeps of this piece."""
        return [self.place.read(each) for each in self._of(layer).values]

    def ancestors(self) -> list[PieceKeys]:
        """The pieces before this one, the first of the row first."""
        return [] if self.before is None else [*self.before.ancestors(), self.before]

    def last(self, layer: Hashable, count: int) -> list[Tensor]:
        """So many of the last tokens before the piece, of each tensor that a layer keeps."""
        parts: list[list[Tensor]] = []
        piece = self.before
        while count and piece is not None:
            taken = min(count, piece.tokens)
            parts.insert(0, [each[each.shape[0] - taken :] for each in piece.read(layer)])
            count, piece = count - taken, piece.before
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def leave(self, layer: Hashable, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to those of the last tokens that a layer keeps of this piece, at least in float32."""
        kept = self._of(layer)
        wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in gradients]
        if kept.gradients is None:
            whole = [self._padded(each, value) for each, value in zip(wide, kept.values, strict=True)]
            kept.gradients = [self.place.keep(each) for each in whole]
            return
        for number, each in enumerate(wide):
            sum_so_far = self.place.read(kept.gradients[number])
            sum_so_far[sum_so_far.shape[0] - each.shape[0] :] += each
            self.place.free(kept.gradients[number])
            kept.gradients[number] = self.place.keep(sum_so_far)

    def _padded(self, gradient: Tensor, value: Any) -> Tensor:
        """The gradients of all that is kept, zero but for the last tokens'."""
        missing = self.place.read(value).shape[0] - gradient.shape[0]
        return torch.cat([gradient.new_zeros(missing, *gradient.shape[1:]), gradient]) if missing else gradient

    def leave_last(self, layer: Hashable, gradients: Sequence[Tensor]) -> None:
        """Adds gradients to those of the last tokens before the piece, as `last` gave them."""
        piece, stop = self.before, gradients[0].shape[0]
        while stop and piece is not None:
            start = max(stop - piece.tokens, 0)
            piece.leave(layer, [each[start:stop] for each in gradients])
            stop, piece = start, piece.before

    def take(self, layer: Hashable) -> list[Tensor] | None:
        """The gradients that later pieces left, which are all there by now; None if they left none."""
        gradients, self._layers[layer].gradients = self._layers[layer].gradients, None
        if gradients is None:
            return None
        found = [self.place.read(each) for each in gradients]
        for each in gradients:
            self.place.free(each)
        return found

    def forget_values(self) -> None:
        """Drops what the layers keep, once no later piece reads it; gradients stay until they are taken."""
        for kept in self._layers.values():
            for each in kept.values:
                self.place.free(each)
            kept.values = []
