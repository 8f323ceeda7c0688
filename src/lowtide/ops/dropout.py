"""Dropout from bits that are drawn again in backward in place of kept, alone and on the weights of attention, which are
formed again too; so are those of attention with learned biases, which no kernel has a gradient for.

torch's own draws a float for each entry on one core (5.8 ns an entry on two cores of an AMD EPYC, here 0.7), and keeps
4 bytes of it until backward; attention with dropout keeps three such tensors of queries x keys. Here 16 bits decide on
an entry, so a rate is met to 2^-17, and what stays is scaled by the rate that was met: the mean is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lowtide.compat.torch import FakeTensor
from lowtide.ops.target import target_of

LEVELS = 1 << 16
"""Values of the bits that decide on an entry."""
BLOCK = 1 << 23
"""Attention weights that are formed at a time, or those of one segment."""


def drops_here(x: Tensor, rate: float) -> bool:
    """Whether there is something to drop, on a device where it is better done here."""
    return rate > 0 and target_of(x).kind == "cpu"


def dropout(x: Float[Tensor, " ..."], rate: float) -> Float[Tensor, " ..."]:
    """`x` with its entries zero at the rate, and the others scaled so that their mean stays."""
    return _Dropout.apply(x, rate)


def written_attention(
    query: Float[Tensor, "segments heads queries dim"],
    key: Float[Tensor, "segments heads keys dim"],
    value: Float[Tensor, "segments heads keys value_dim"],
    mask: Bool[Tensor, " ..."] | None,
    scale: float,
    rate: float,
    bias: Float[Tensor, "heads distances"] | None = None,
) -> Float[Tensor, "segments heads queries value_dim"]:
    """Attention whose weights are dropped at a rate; nothing of the size of queries x keys outlives the call.

    Scores and weights are at least in float32. `mask` is True where a query sees a key; None where it sees all. `bias`
    is added to the scores by the distance from query to key, from the last query and the first key upwards.
    """
    return _Attention.apply(query, key, value, mask, scale, rate, bias)


class _Bits:
    """What stays of tensors that are drawn for one after the other, again the same from the same seed.

    On a CPU they come from SFC64 (numpy), a quarter of the time of torch's Mersenne twister; the seed from torch.
    """

    def __init__(self, seed: Tensor, rate: float, device: torch.device) -> None:
        self.device, self._dropped = device, round(rate * LEVELS)
        self.factor = LEVELS / (LEVELS - self._dropped) if self._dropped < LEVELS else 0.0
        """By which what stays is scaled."""
        self._is_plan = isinstance(seed, FakeTensor)  # of memory: what is allocated is all there is to see
        self._words: Any = None
        if not self._is_plan and device.type == "cpu":
            self._words = np.random.Generator(np.random.SFC64(int(seed)))
        elif not self._is_plan:
            self._words = torch.Generator(device).manual_seed(int(seed))

    def stay(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """1 where an entry stays, 0 where it does not."""
        count = int(torch.Size(shape).numel())
        bits = self._draw((count + 3) // 4).view(torch.int16)[:count].view(shape)
        return torch.ge(bits, self._dropped - LEVELS // 2, out=bits.new_empty(shape, dtype=dtype))

    def _draw(self, count: int) -> Tensor:
        """Random int64 words."""
        if isinstance(self._words, np.random.Generator):
            return torch.from_numpy(self._words.integers(-(1 << 63), 1 << 63, count))
        words = torch.empty(count, dtype=torch.int64, device=self.device)
        return words if self._is_plan else words.random_(-(1 << 63), None, generator=self._words)


def _seed() -> Tensor:
    """Drawn from torch's generator of the CPU."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_()


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.seed, ctx.rate = _seed(), rate
        return _dropped(x, ctx.seed, rate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return _dropped(gradient, ctx.seed, ctx.rate), None


def _dropped(x: Tensor, seed: Tensor, rate: float) -> Tensor:
    bits = _Bits(seed, rate, x.device)
    return bits.stay(x.shape, x.dtype).mul_(x).mul_(bits.factor)


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
        seed = _seed() if rate else None
        ctx.seed, ctx.scale, ctx.rate = seed, scale, rate
        out = v.new_empty(*q.shape[:3], v.shape[3])
        bits = None if seed is None else _Bits(seed, rate, q.device)
        for block in _blocks(q, k):
            weights = _weights(_times(q[block], scale), k[block], _of(mask, block), bias)
            if bits is not None:
                weights.mul_(bits.stay(weights.shape, weights.dtype))
            torch.matmul(weights.to(v.dtype), v[block], out=out[block])
        ctx.save_for_backward(q, k, v, mask, out if bits is None else out.mul_(bits.factor), bias)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        q, k, v, mask, out, bias = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dbias: Tensor | None = None
        bits = _Bits(ctx.seed, ctx.rate, q.device) if ctx.rate else None
        for block in _blocks(q, k):
            # contiguous, since each is in two products, which would copy it twice
            scaled, keys = _times(q[block], ctx.scale), k[block].contiguous()
            outer = _times(g[block], bits.factor) if bits is not None else g[block].contiguous()
            weights = _weights(scaled, keys, _of(mask, block), bias)
            slopes = (outer @ v[block].transpose(-1, -2)).to(weights.dtype)
            stays = bits.stay(weights.shape, weights.dtype) if bits is not None else None
            if stays is not None:
                slopes.mul_(stays)
            mean = (g[block] * out[block]).sum(-1, keepdim=True, dtype=weights.dtype)
            slopes.sub_(mean).mul_(weights)
            if bias is not None:
                own = _by_distance(slopes.sum(0))
                dbias = own if dbias is None else dbias.add_(own)
            if stays is not None:
                weights.mul_(stays)
            torch.matmul(weights.to(v.dtype).transpose(-1, -2), outer, out=dv[block])
            slopes = slopes.to(q.dtype)
            torch.matmul(slopes, keys, out=dq[block])
            torch.matmul(slopes.transpose(-1, -2), scaled, out=dk[block])
        return dq.mul_(ctx.scale), dk, dv, None, None, None, None if dbias is None else dbias.to(bias)


def _times(x: Tensor, factor: float) -> Tensor:
    """`x` times a number, contiguous."""
    return torch.mul(x, factor, out=x.new_empty(x.shape))


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


def _weights(scaled: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    scores = scaled @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores += bias.unfold(1, k.shape[2], 1).flip(1)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1)
