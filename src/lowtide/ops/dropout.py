"""Dropout from bits that are drawn again in backward in place of kept, alone and on the weights of attention, which are
formed again too; so are those of attention with learned biases, which no kernel has a gradient for.

torch's own draws a float for each entry on one core (5.8 ns an entry on two cores of an AMD EPYC, here 0.8), and keeps
4 bytes of it until backward; attention with dropout keeps three such tensors of queries x keys. Here 16 bits decide on
an entry, so a rate is met to 2^-17, and what stays is scaled by the rate that was met: the mean is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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


def written_attention(
    query: Float[Tensor, "segments heads queries dim"],
    key: Float[Tensor, "segments heads keys dim"],
    value: Float[Tensor, "segments heads keys value_dim"],
    mask: Bool[Tensor, ...] | None,
    scale: float,
    rate: float,
    bias: Float[Tensor, "heads distances"] | None = None,
) -> Float[Tensor, "segments heads queries value_dim"]:
    """Attention whose weights are dropped at a rate; nothing of the size of queries x keys outlives the call.

    Scores and weights are at least in float32. `mask` is True where a query sees a key; None where it sees all. `bias`
    is added to the scores by the distance from query to key, from the last query and the first key upwards.
    """
    return _Attention.apply(query, key, value, mask, scale, rate, bias)


def _draw(shape: Sequence[int], rate: float, device: torch.device) -> tuple[Tensor, float]:
    """What stays, from torch's generator, and the factor that it is scaled by."""
    count, dropped = int(torch.Size(shape).numel()), round(rate * LEVELS)
    bits = torch.empty((count + 3) // 4, dtype=torch.int64, device=device).random_(-(1 << 63), None).view(torch.int16)
    stays = bits[:count].view(shape) >= dropped - LEVELS // 2
    return stays, LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


def _state(device: torch.device) -> Tensor:
    """Of torch's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _again(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """torch's generator as it was, while the context lasts; None where nothing is drawn."""
    if state is None:
        yield
        return
    now = _state(device)
    _set_state(state, device)
    try:
        yield
    finally:
        _set_state(now, device)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.state, ctx.rate = _state(x.device), rate
        stays, factor = _draw(x.shape, rate, x.device)
        return (x * stays).mul_(factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        with _again(ctx.state, gradient.device):
            stays, factor = _draw(gradient.shape, ctx.rate, gradient.device)
        return (gradient * stays).mul_(factor), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        rate: float,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.state, ctx.scale, ctx.rate = _state(q.device) if rate else None, scale, rate
        out = v.new_empty(*q.shape[:3], v.shape[3])
        for block in _blocks(q, k):
            weights = _weights(q[block], k[block], _of(mask, block), scale, bias)
            if rate:
                stays, factor = _draw(weights.shape, rate, q.device)
                weights.mul_(stays).mul_(factor)
            torch.matmul(weights.to(v.dtype), v[block], out=out[block])
        ctx.save_for_backward(q, k, v, mask, out, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        q, k, v, mask, out, bias = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dbias: Tensor | None = None
        with _again(ctx.state, q.device):
            for block in _blocks(q, k):
                weights = _weights(q[block], k[block], _of(mask, block), ctx.scale, bias)
                slopes = (g[block] @ v[block].transpose(-1, -2)).to(weights.dtype)
                kept = weights
                if ctx.rate:
                    stays, factor = _draw(weights.shape, ctx.rate, q.device)
                    kept = (weights * stays).mul_(factor)
                    slopes.mul_(stays).mul_(factor)
                torch.matmul(kept.to(v.dtype).transpose(-1, -2), g[block], out=dv[block])
                del kept
                mean = (g[block] * out[block]).sum(-1, keepdim=True, dtype=weights.dtype)
                slopes.sub_(mean).mul_(weights)
                if bias is not None:
                    own = _by_distance(slopes.sum(0))
                    dbias = own if dbias is None else dbias.add_(own)
                slopes = slopes.mul_(ctx.scale).to(q.dtype)
                torch.matmul(slopes, k[block], out=dq[block])
                torch.matmul(slopes.transpose(-1, -2), q[block], out=dk[block])
        return dq, dk, dv, None, None, None, None if dbias is None else dbias.to(bias)


def _by_distance(scores: Float[Tensor, "heads queries keys"]) -> Float[Tensor, "heads distances"]:
    """Sums over queries and keys of each distance: each row is moved on by a place, by another view of its padding."""
    _, queries, keys = scores.shape
    rows = F.pad(scores.flip(1), (0, queries)).flatten(1)
    return rows[:, : queries * (queries + keys - 1)].unflatten(1, (queries, -1)).sum(1)


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Segments whose weights are formed together."""
    step = max(1, BLOCK // (q.shape[1] * q.shape[2] * k.shape[2]))
    return (slice(start, start + step) for start in range(0, q.shape[0], step))


def _of(mask: Tensor | None, block: slice) -> Tensor | None:
    return mask[block] if mask is not None and mask.dim() == 4 else mask


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, bias: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if bias is not None:
        scores += bias.unfold(1, k.shape[2], 1).flip(1)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1)
