"""Ranks that hold the same weights: they start equal, and add up their gradients after their last backward.

DistributedDataParallel exchanges during the last backward, to hide the time. That takes a second copy of the gradients,
and a rank that runs out of memory there leaves the others waiting for ever. Here micro-batches run without exchange,
the ranks tell each other whether they all came through, and only then add up their gradients, in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def average_gradients(model: nn.Module) -> None:
    """Makes every rank's gradients their mean over ranks; a parameter that no rank used keeps none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    gradients = []
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0].view(-1) if alone else torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        if alone:
            continue
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


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
