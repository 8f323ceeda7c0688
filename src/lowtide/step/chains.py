"""A long row through a model, piece by piece: once without gradients, and once with, from the last piece to the first.

The first pass keeps what later pieces see (`ops.piece_keys`) and the random state of each piece. The second one runs a
piece forward again and backward at once, after all pieces that go on from it: by then these have left the gradients of
its keys and values. So no more than one piece's activations are held, however long the row is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowtide.engine.heads.head import ScoreOutput
from lowtide.ops.piece_keys import KeyPlace, OnDevice
from lowtide.ragged import RaggedBatch
from lowtide.step.pieces import LongRow
from lowtide.step.rank_sync import random_state, set_random_state

T = TypeVar("T")


class Chain:
    """One pass of a model over a long row, or two.

    Args:
        row: in pieces.
        place: where the layers' keys wait.
    """

    def __init__(self, row: LongRow, place: KeyPlace | None = None) -> None:
        self.row, self.keys = row, row.keys(place or OnDevice())
        self.device = row.batch.token_ids.device
        self._random: dict[int, list[Tensor]] = {}

    def batch(self, number: int) -> RaggedBatch:
        """A piece, which goes on from those before it."""
        return replace(self.row.pieces[number].batch, piece=self.keys[number])

    @property
    def inner(self) -> list[int]:
        """The pieces that others go on from."""
        return [number for number, keys in enumerate(self.keys) if keys is not None and keys.keeps]

    def first_pass(self, run: Callable[[RaggedBatch], T], *, inner_only: bool = False) -> list[T]:
        """Runs a function of a batch on each piece, without gradients; layers keep what later pieces see.

        Args:
            inner_only: leaves out those that no other goes on from.
        """
        found = []
        for number in self.inner if inner_only else range(len(self.keys)):
            keys = self.keys[number]
            self._random[number] = random_state(self.device)
            with torch.no_grad(), contextlib.nullcontext() if keys is None else keys.recording():
                found.append(run(self.batch(number)))
        return found

    def scores(self, run: Callable[[RaggedBatch], T]) -> list[T]:
        """`first_pass`, where no other pass follows: what no later piece sees is dropped at once."""
        last = self._last_readers()
        found = []
        for number, keys in enumerate(self.keys):
            with torch.no_grad(), contextlib.nullcontext() if keys is None else keys.recording():
                found.append(run(self.batch(number)))
            for earlier in last.get(number, ()):
                earlier.forget_values()
        return found

    def _last_readers(self) -> dict[int, list[Any]]:
        """By piece, the pieces that none after it goes on from."""
        last: dict[int, int] = {}
        for number, keys in enumerate(self.keys):
            for earlier in [] if keys is None else keys.ancestors():
                last[id(earlier)] = number
        found: dict[int, list[Any]] = {}
        for keys in self.keys:
            if keys is not None and id(keys) in last:
                found.setdefault(last[id(keys)], []).append(keys)
        return found

    def last_pass(self) -> Iterator[int]:
        """The pieces in the order in which they go backward."""
        for number in reversed(range(len(self.keys))):
            self.forget_values(number)
            yield number
        self._random.clear()

    def forget_values(self, number: int) -> None:
        """Drops what the layers keep of a piece, once all that go on from it went backward."""
        keys = self.keys[number]
        if keys is not None:
            keys.forget_values()

    @contextlib.contextmanager
    def replayed(self, number: int) -> Iterator[None]:
        """Around the forward of the second pass: a piece draws what it drew in the first, if it was a part of it."""
        before = self._random.get(number)
        if before is None:
            yield
            return
        now = random_state(self.device)
        set_random_state(before, self.device)
        try:
            yield
        finally:
            set_random_state(now, self.device)


def in_row_order(row: LongRow, found: list[Tensor]) -> Tensor:
    """[scores] of a row, from those of its pieces."""
    order = torch.cat([piece.scores for piece in row.pieces]).to(found[0].device)
    joined = torch.cat(found)
    return torch.empty_like(joined).index_copy_(0, order, joined)


def joined_output(row: LongRow, outputs: list[Any]) -> Any:
    """The output of a row from those of its pieces: statistics in the order of its scores, losses added up."""
    values: dict[str, Any] = {}
    for each in fields(outputs[0]):
        parts = [getattr(output, each.name) for output in outputs]
        if parts[0] is None:
            values[each.name] = None
        elif each.name == "loss":
            values[each.name] = torch.stack(parts).sum()
        else:
            values[each.name] = in_row_order(row, parts)
    return type(outputs[0])(**values)


def detached(output: Any) -> Any:
    """An output without its graph."""
    values = {each.name: getattr(output, each.name) for each in fields(output)}
    return type(output)(**{name: None if value is None else value.detach() for name, value in values.items()})


@dataclass(frozen=True)
class Slopes:
    """The gradient of the loss with respect to each statistic of a row's scores that has one."""

    of: dict[str, Tensor]

    @classmethod
    def leaves(cls, output: ScoreOutput) -> dict[str, Tensor]:
        """The statistics of an output that gradients may be of, which want them from now on."""
        found = {each.name: getattr(output, each.name) for each in fields(output)}  # type: ignore[arg-type]
        return {
            name: value.requires_grad_()
            for name, value in found.items()
            if isinstance(value, Tensor) and value.is_floating_point() and name not in ("loss", "aux_loss")
        }

    @classmethod
    def from_loss(cls, loss: Tensor, leaves: dict[str, Tensor]) -> Slopes:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return cls({name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None})

    def product(self, output: ScoreOutput, places: Tensor) -> Tensor:
        """The product of slopes and statistics of a piece, whose gradient is the loss's."""
        terms = [(getattr(output, name) * slope[places.to(slope.device)]).sum() for name, slope in self.of.items()]
        return torch.stack(terms).sum() if terms else output.nothing * 0.0
