"""Ranks that hold the same weights: they start equal, and add up their gradients after their last backward.

DistributedDataParallel exchanges during the last backward, to hide the time. That takes a second copy of the gradients,
and a rank that runs out of memory there leaves the others waiting for ever. Here micro-batches run without exchange,
what the exchange takes is allocated, the ranks tell each other whether they all came through, and only then add up
their gradients, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 64 << 20
"""Gradients exchanged at a time: enough to use the link well, small beside the gradients."""


def broadcast_weights(model: nn.Module) -> None:
    """Gives every rank the weights and buffers of the first."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)


def averaging(model: nn.Module) -> Callable[[], None]:
    """Allocates what it takes to make every rank's gradients their mean over ranks, and returns what does so.

    In two parts, so that a rank whose memory is exhausted can say so before it is waited for. A parameter that no rank
    used has no gradient in the end.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return lambda: None
    device = parameters[0].device
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    buckets = list(_buckets([cast(Tensor, p.grad) for p in parameters]))
    largest = max((_bytes(bucket) for bucket in buckets if not _in_place(bucket)), default=0)
    room = torch.empty(largest, dtype=torch.uint8, device=device)

    def average() -> None:
        dist.all_reduce(used, dist.ReduceOp.MAX)
        unused = [p for p, anywhere in zip(parameters, used.tolist(), strict=True) if not anywhere]
        dropped = {p.grad for p in unused}
        for parameter in unused:
            parameter.grad = None
        for bucket in buckets:
            _average([gradient for gradient in bucket if gradient not in dropped], room)

    return average


def _average(gradients: Sequence[Tensor], room: Tensor) -> None:
    """A bucket: as it lies, or through a copy."""
    if not gradients:
        return
    if _in_place(gradients):
        _mean(gradients[0].view(-1))
        return
    flat = room[: _bytes(gradients)].view(gradients[0].dtype)
    pieces = flat.split([g.numel() for g in gradients])
    copies = [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)]
    for gradient, copy in zip(gradients, copies, strict=True):
        copy.copy_(gradient)
    _mean(flat)
    for gradient, copy in zip(gradients, copies, strict=True):
        gradient.copy_(copy)


def _mean(flat: Tensor) -> None:
    dist.all_reduce(flat)
    flat /= dist.get_world_size()


def _in_place(bucket: Sequence[Tensor]) -> bool:
    return len(bucket) == 1 and bucket[0].is_contiguous()


def _bytes(bucket: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in bucket)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to the size of a bucket."""
    bucket: list[Tensor] = []
    held = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if bucket and (held + size > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(gradient)
        held += size
    if bucket:
        yield bucket
