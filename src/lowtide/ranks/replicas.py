"""Ranks that hold the same weights: they start equal, and add up their gradients in and after their last backward.

The gradient of an embedding is complete when backward is over, and is zero but for the rows of the tokens that came.
So ranks tell each other which rows are not zero, a byte a row, and add up those alone, where these are at most half.

DistributedDataParallel exchanges during the last backward too, to hide the time. There a rank that runs out of memory
leaves the others waiting for ever. Here it takes part in the exchanges that are left, with zeros from memory that is
set aside for it; then the ranks tell each other whether they all came through, and only then do gradients count.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.compat.torch import backward_number, sent_parts
from lowtide.ranks.shards import local_of

BUCKET_BYTES = 16 << 20
"""Gradients exchanged at a time: enough to use the link well, small beside the gradients."""
MOST_ROWS = 0.5
"""Share of the rows of an embedding up to which these are exchanged by themselves."""
ROOMS = 2
"""Buckets that are copied together for it at a time: while one is on its way, the next is filled."""


def broadcast_weights(model: nn.Module, keep: Collection[Tensor] = ()) -> None:
    """Gives every rank the weights and buffers of the first.

    Args:
        keep: those that each rank has from files of its own, and that are not to be written to.
    """
    kept = {id(tensor) for tensor in keep}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            for part in () if id(tensor) in kept else sent_parts(tensor):
                dist.broadcast(part, src=0)


@dataclass(frozen=True)
class Piece:
    """A part of a parameter's gradient, by its flattened numbers."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many numbers."""
        return self.stop - self.start

    def of(self, gradient: Tensor) -> Tensor:
        """Its numbers: as they lie, or a copy of those that do not lie in one run."""
        return gradient.reshape(-1)[self.start : self.stop]

    def put(self, numbers: Tensor) -> None:
        """Writes other ones in their place."""
        assert self.parameter.grad is not None
        gradient = local_of(self.parameter.grad)
        if gradient.is_contiguous():
            gradient.view(-1)[self.start : self.stop] = numbers
        else:  # never cut: see `_buckets`
            gradient.copy_(numbers.view(gradient.shape))


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter's gradient."""

    parameter: nn.Parameter
    rows: Tensor
    """[rows]: their numbers."""

    @property
    def count(self) -> int:
        """How many numbers."""
        return len(self.rows) * local_of(self.parameter).shape[1]

    def of(self, gradient: Tensor) -> Tensor:
        """A copy of its numbers."""
        return gradient.index_select(0, self.rows).flatten()

    def put(self, numbers: Tensor) -> None:
        """Writes other ones in their place."""
        assert self.parameter.grad is not None
        local_of(self.parameter.grad).index_copy_(0, self.rows, numbers.view(len(self.rows), -1))


Bucket = Sequence[Piece | Rows]
"""What is exchanged at a time."""


@dataclass
class Flight:
    """A bucket on its way."""

    bucket: Bucket
    flat: Tensor
    room: Tensor | None
    """The memory that it was copied to; None where it goes as it lies."""
    work: Any
    counts: bool
    """False for zeros of a rank that failed."""


@dataclass
class Averaging:
    """Makes every rank's gradients their mean over ranks, in buckets of one order on all of them.

    Within `overlap` a bucket goes as soon as it and those before it are complete. In the end every rank calls
    `complete`, or `forgo` if it failed.
    """

    model: nn.Module
    first: Sequence[nn.Parameter] = ()
    """Whose gradients are complete before any that autograd accumulates: the head's, which is formed in place."""
    last: Sequence[nn.Parameter] = ()
    """Whose gradients are complete when backward is over: the embedding's, likewise. They are exchanged by rows."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the same weights, or the same parts of them; None for all."""
    _flying: deque[Flight] = field(default_factory=deque)

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        apart = {*self.first, *self.last}
        self.watched = [p for p in reversed(trained) if p not in apart]
        self.parameters = [*self.first, *self.watched, *self.last]
        self.by_rows = [p for p in self.last if local_of(p).ndim == 2]
        whole = [p for p in self.parameters if p not in {*self.by_rows}]
        self.buckets: list[Bucket] = [*_buckets(whole)]
        self.places: dict[nn.Parameter, list[int]] = {p: [] for p in self.parameters}
        for number, bucket in enumerate(self.buckets):
            for piece in bucket:
                self.places[piece.parameter].append(number)
        row = [local_of(p).shape[1] * p.element_size() for p in self.by_rows]
        largest = max(row + [_bytes(bucket) for bucket in (*self.buckets, *_buckets(self.by_rows))], default=0)
        self._device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._rooms = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(ROOMS)]
        self._begin()

    def _begin(self) -> None:
        self._missing = [len({piece.parameter for piece in bucket}) for bucket in self.buckets]
        self._ready: set[nn.Parameter] = set()
        self._posted = 0

    @contextlib.contextmanager
    def overlap(self) -> Iterator[None]:
        """Around the forward and backward in which every gradient is complete as it arrives.

        What arrives in a backward within that one (of a part that is computed again, or in tiles) may go on growing,
        and waits for the end.
        """
        outer = 0

        def arrived(parameter: Any) -> None:
            nonlocal outer
            outer = outer or backward_number()
            if backward_number() == outer:
                self._take(*self.first, parameter)

        handles = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in self.watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def complete(self) -> Callable[[], None]:
        """Sends what is left, and takes in all that comes back; returns what drops the gradients that no rank had."""
        used = torch.tensor([float(p.grad is not None) for p in self.parameters], device=self._device)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._post_rest(counts=True)

        def drop_unused() -> None:
            if not self.parameters:
                return
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
            for parameter, anywhere in zip(self.parameters, used.tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None

        return drop_unused

    def forgo(self) -> None:
        """Takes part in the exchanges that are left, for a rank that failed: the others wait in them."""
        self._post_rest(counts=False)

    def _take(self, *parameters: nn.Parameter) -> None:
        """Notes that gradients are complete, and sends the buckets that are."""
        for parameter in parameters:
            if parameter in self._ready or parameter.grad is None:
                continue
            self._ready.add(parameter)
            for number in self.places[parameter]:
                self._missing[number] -= 1
        while self._posted < len(self.buckets) and self._missing[self._posted] == 0:
            self._post(counts=True)

    def _post_rest(self, counts: bool) -> None:
        while self._posted < len(self.buckets):
            self._post(counts)
        for parameter in self.by_rows:
            for bucket in self._buckets_of_rows(parameter, counts):
                self._send(bucket, counts)
        while self._flying:
            self._land()
        self._begin()

    @torch.no_grad()
    def _buckets_of_rows(self, parameter: nn.Parameter, counts: bool) -> Iterator[Bucket]:
        """The rows of a gradient that are not zero on some rank; all of it where these are many. A rank that failed
        has none, and learns those of the others."""
        here = local_of(parameter)
        there = torch.zeros(len(here), dtype=torch.uint8, device=here.device)
        if counts and parameter.grad is not None:
            there.copy_(torch.linalg.vector_norm(local_of(parameter.grad), torch.inf, dim=1) != 0)
        work: Any = dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group, async_op=True)
        work.wait()
        rows = there.nonzero().flatten()
        if len(rows) > MOST_ROWS * len(here):
            yield from _buckets([parameter])
            return
        most = max(BUCKET_BYTES // (here.shape[1] * here.element_size()), 1)
        yield from ([Rows(parameter, some)] for some in rows.split(most) if len(some))

    def _post(self, counts: bool) -> None:
        self._send(self.buckets[self._posted], counts)
        self._posted += 1

    @torch.no_grad()
    def _send(self, bucket: Bucket, counts: bool) -> None:
        room, first = None, bucket[0].parameter.grad
        gradient = None if first is None else local_of(first)
        alone = counts and len(bucket) == 1 and isinstance(bucket[0], Piece)
        if alone and gradient is not None and gradient.is_contiguous():
            flat = bucket[0].of(gradient)
        else:
            room = self._free_room()
            flat = room[: _bytes(bucket)].view(bucket[0].parameter.dtype)
            for piece, copy in _within(flat, bucket):
                if counts and piece.parameter.grad is not None:
                    copy.copy_(piece.of(local_of(piece.parameter.grad)))
                else:
                    copy.zero_()
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self._flying.append(Flight(bucket, flat, room, work, counts))

    def _free_room(self) -> Tensor:
        """A room that no bucket on its way is in; waits for one."""
        while not self._rooms:
            self._land()
        return self._rooms.pop()

    @torch.no_grad()
    def _land(self) -> None:
        """Takes in the bucket that was sent first."""
        flight = self._flying.popleft()
        try:
            flight.work.wait()
        finally:
            if flight.room is not None:
                self._rooms.append(flight.room)
        if not flight.counts:
            return
        flight.flat /= dist.get_world_size(self.group)
        if flight.room is not None:
            for piece, copy in _within(flight.flat, flight.bucket):
                piece.put(copy)


def _within(flat: Tensor, bucket: Bucket) -> Iterator[tuple[Piece | Rows, Tensor]]:
    """Each piece of a bucket, with its place in the bucket's memory."""
    return zip(bucket, flat.split([piece.count for piece in bucket]), strict=True)


def _bytes(bucket: Bucket) -> int:
    return sum(piece.count * piece.parameter.element_size() for piece in bucket)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[Piece]]:
    """Neighbours of one dtype, up to the size of a bucket; larger ones in pieces by themselves, unless they do not lie
    in one run."""
    bucket: list[Piece] = []
    for parameter in parameters:
        most = max(BUCKET_BYTES // parameter.element_size(), 1)
        part = local_of(parameter)
        count = part.numel()
        if count > most and part.is_contiguous():
            if bucket:
                yield bucket
            bucket = []
            yield from ([Piece(parameter, start, min(start + most, count))] for start in range(0, count, most))
            continue
        piece = Piece(parameter, 0, count)
        if bucket and (_bytes([*bucket, piece]) > BUCKET_BYTES or bucket[0].parameter.dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(piece)
    if bucket:
        yield bucket
