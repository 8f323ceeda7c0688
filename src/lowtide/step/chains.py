"""The pieces of a micro-batch through a model, those before others first.

Layers keep of a piece what later pieces see (`ops.attention.piece_keys`). A pass without gradients drops it once no
piece to come goes on from there. A pass with gradients runs a piece's forward again and backward at once, after all
pieces that go on from it: by then these have left the gradients of its keys and values. So no more than one piece's
activations are held, however long the row is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from lowtide.ops.attention.piece_keys import KeyPlace, OnDevice, PieceKeys
from lowtide.ragged import RaggedBatch
from lowtide.step.cut import Part

T = TypeVar("T")


class Chain:
    """One pass of a model over the pieces of a micro-batch, or two.

    Args:
        part: in one piece or several.
        place: where the layers' keys wait.
    """

    def __init__(self, part: Part, place: KeyPlace | None = None) -> None:
        self.part, self.keys = part, part.keys(place or OnDevice())

    def batch(self, number: int) -> RaggedBatch:
        """A piece, which goes on from those before it."""
        piece, keys = self.part.pieces[number].batch, self.keys[number]
        return piece if keys is None else replace(piece, piece=keys)

    def score(self, number: int, run: Callable[[RaggedBatch], T], *, keeps: bool = False) -> T:
        """Runs a function of a batch on a piece, without gradients; layers keep what later pieces see.

        Args:
            keeps: also once no later piece sees it, for a pass with gradients.
        """
        keys = self.keys[number]
        with torch.no_grad(), contextlib.nullcontext() if keys is None else keys.recording():
            found = run(self.batch(number))
        for earlier in () if keeps else self._last_read.get(number, ()):
            earlier.forget_values()
        return found

    def scores(self, run: Callable[[RaggedBatch], T]) -> list[T]:
        """The same of all pieces, where no other pass follows."""
        return [self.score(number, run) for number in range(len(self.keys))]

    @functools.cached_property
    def _last_read(self) -> dict[int, list[PieceKeys]]:
        """By piece, the pieces that none after it goes on from."""
        last: dict[int, int] = {}
        for number, keys in enumerate(self.keys):
            for earlier in [] if keys is None else keys.ancestors():
                last[id(earlier)] = number
        found: dict[int, list[PieceKeys]] = {}
        for keys in self.keys:
            if keys is not None and id(keys) in last:
                found.setdefault(last[id(keys)], []).append(keys)
        return found

    def forget(self, number: int) -> None:
        """Drops what the layers keep of a piece, once all that go on from it went backward."""
        keys = self.keys[number]
        if keys is not None:
            keys.forget_values()
