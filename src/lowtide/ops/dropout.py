"""Dropout on a CPU, alone and on the weights of attention, from bits that are drawn again in backward in place of kept.

torch's own draws a float for each entry on one core (5.8 ns an entry on two cores of an AMD EPYC, here 0.8), and keeps
4 bytes of it until backward; attention with dropout keeps three such tensors of queries x keys. Here 16 bits decide on
an entry, so a rate is met to 2^-17, and what stays is scaled by the rate that was met: the mean is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.ops.target import target_of

LEVELS = 1 << 16
"""Values of the bits that decide on an entry."""
BLOCK = 1 << 23
"""Attention weights that are formed at a time, or those of one segment."""


def drops_here(x: Tensor, rate: float) -> bool:
    """Whether there is something to drop, on a device where it is better done here."""
    return rate > 0 and target_of(x).kind == "cpu"


def dropout(x: Float[Tensor, ...], rate: float) -> Float[Tensor, ...]:
    """`x` with its entries zero at the rate, and the others scaled so that their mean stays."""
    return _Dropout.apply(x, rate)


def dropped_attention(
    query: Float[Tensor, "segments heads queries dim"],
    key: Float[Tensor, "segments heads keys dim"],
    value: Float[Tensor, "segments heads keys value_dim"],
    mask: Bool[Tensor, ...] | None,
    scale: float,
    rate: float,
) -> Float[Tensor, "segments heads queries value_dim"]:
    """Attention whose weights are dropped at a rate; nothing of the size of queries x keys outlives the call.

    Scores and weights are at least in float32. `mask` is True where a query sees a key; None where it sees all.
    """
    return _Attention.apply(query, key, value, mask, scale, rate)


def _draw(shape: Sequence[int], rate: float) -> tuple[Tensor, float]:
    """What stays, from torch's generator, and the factor that it is scaled by."""
    count, dropped = int(torch.Size(shape).numel()), round(rate * LEVELS)
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
    stays = bits[:count].view(shape) >= dropped - LEVELS // 2
    return stays, LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


@contextlib.contextmanager
def _again(state: Tensor) -> Iterator[None]:
    """torch's generator as it was, while the context lasts."""
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.state, ctx.rate = torch.get_rng_state(), rate
        stays, factor = _draw(x.shape, rate)
        return (x * stays).mul_(factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        with _again(ctx.state):
            stays, factor = _draw(gradient.shape, ctx.rate)
        return (gradient * stays).mul_(factor), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, rate: float) -> Tensor:
        ctx.state, ctx.scale, ctx.rate = torch.get_rng_state(), scale, rate
        out = v.new_empty(*q.shape[:3], v.shape[3])
        for block in _blocks(q, k):
            weights = _weights(q[block], k[block], _of(mask, block), scale)
            stays, factor = _draw(weights.shape, rate)
            torch.matmul(weights.mul_(stays).mul_(factor).to(v.dtype), v[block], out=out[block])
        ctx.save_for_backward(q, k, v, mask, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        q, k, v, mask, out = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        with _again(ctx.state):
            for block in _blocks(q, k):
                weights = _weights(q[block], k[block], _of(mask, block), ctx.scale)
                stays, factor = _draw(weights.shape, ctx.rate)
                kept = (weights * stays).mul_(factor).to(v.dtype)
                torch.matmul(kept.transpose(-1, -2), g[block], out=dv[block])
                del kept
                slopes = (g[block] @ v[block].transpose(-1, -2)).to(weights.dtype).mul_(stays).mul_(factor)
                mean = (g[block] * out[block]).sum(-1, keepdim=True, dtype=weights.dtype)
                slopes = slopes.sub_(mean).mul_(weights).mul_(ctx.scale).to(q.dtype)
                torch.matmul(slopes, k[block], out=dq[block])
                torch.matmul(slopes.transpose(-1, -2), q[block], out=dk[block])
        return dq, dk, dv, None, None, None


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Segments whose weights are formed together."""
    step = max(1, BLOCK // (q.shape[1] * q.shape[2] * k.shape[2]))
    return (slice(start, start + step) for start in range(0, q.shape[0], step))


def _of(mask: Tensor | None, block: slice) -> Tensor | None:
    return mask[block] if mask is not None and mask.dim() == 4 else mask


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1)
