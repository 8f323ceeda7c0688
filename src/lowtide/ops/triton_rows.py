"""The passes of `logit_rows.TorchRows` as two Triton kernels: one that reads a row, one that overwrites it.

The first goes over the vocabulary once, with a running maximum and sums that are rescaled when it grows (online
softmax, Milakov and Gimelshein, arXiv 1805.02867). The second takes the log-sum-exp as known and is independent for
each block of a row. Both work in float32 on logits of any smaller dtype; no float32 copy of the logits exists.

Triton comes with the CUDA builds of torch. This module needs it; `logit_rows.rows_of` imports it where it is there.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.ops.logit_rows import Projection, RowStats, Slopes, Want

BLOCK = 4096
"""Columns that a program holds at a time: 16 a thread."""
WARPS = 8


class TritonRows:
    """Some rows of logits; left as they are until the gradient overwrites them."""

    def __init__(self, logits: Tensor, target: Tensor, projection: Projection):
        """`logits` [rows, vocab], contiguous along the vocabulary; `target` [rows]."""
        assert logits.stride(1) == 1
        self.logits, self.target, self.projection = logits, target.contiguous(), projection

    def stats(self, want: Want, keep: bool) -> RowStats:
        """The statistics. `keep` is there for the sake of `TorchRows`."""
        rows = self.logits.shape[0]

        def column(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows if wanted else 0, dtype=dtype, device=self.logits.device)

        stats = RowStats(
            column(),
            column(want.entropies),
            column(want.mean_logprobs),
            column(want.top1, torch.uint8),
            column(),
            column(False),
        )
        self._launch(
            _stats_kernel, (rows,), *stats[:5], ENTROPY=want.entropies, MEAN=want.mean_logprobs, TOP1=want.top1
        )
        self.lse = stats.lse
        return stats._replace(top1=stats.top1.view(torch.bool))

    def restore(self, lse: Tensor, keep: bool) -> None:
        """The state after `stats`, from a log-sum-exp [rows] that is known already."""
        self.lse = lse.contiguous()

    def gradient(self, slopes: Slopes, entropies: Tensor) -> None:
        """Overwrites the logits with the gradient at the raw ones; `entropies` are those that `stats` gave."""
        self._launch(
            _gradient_kernel,
            (self.logits.shape[0], triton.cdiv(self.logits.shape[1], self._block)),
            self.lse,
            entropies.contiguous(),
            *((slopes.logprobs if slope is None else slope).contiguous() for slope in slopes),
            ENTROPY=slopes.entropies is not None,
            MEAN=slopes.mean_logprobs is not None,
        )

    @property
    def _block(self) -> int:
        return min(BLOCK, triton.next_power_of_2(self.logits.shape[1]))

    def _launch(self, kernel, grid: tuple[int, ...], *columns: Tensor, **flags: bool) -> None:
        if isinstance(self.logits, FakeTensor):
            return  # a plan of memory: what was allocated is all there is to see
        scale, softcap, temperature = self.projection
        with torch.cuda.device_of(self.logits):
            kernel[grid](
                self.logits,
                self.target,
                *columns,
                self.logits.stride(0),
                self.logits.shape[1],
                scale,
                softcap or 1.0,
                temperature,
                CAPPED=softcap is not None,
                BLOCK=self._block,
                num_warps=WARPS,
                **flags,
            )


# -- kernels: a row's statistics are float32 scalars, its blocks of logits are read in their own dtype ---------------
# `no_type_check` keeps the tests' shape checks off functions that are compiled from their source.


@triton.jit
@no_type_check
def _projected(raw, scale, softcap, temperature, CAPPED: tl.constexpr):
    x = raw.to(tl.float32) * scale
    if CAPPED:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # tanh, which the language itself does not have
    return x / temperature


@triton.jit
@no_type_check
def _stats_kernel(
    logits,
    target,
    logprobs,
    entropies,
    mean_logprobs,
    top1,
    lses,
    stride,
    vocab,
    scale,
    softcap,
    temperature,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    TOP1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    # Finite, so that the first block needs no case of its own.
    top = -3.0e38
    total = 0.0  # of exp(x - top)
    weighted = 0.0  # of exp(x - top) (x - top)
    summed = 0.0  # of x
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        x = _projected(tl.load(logits + column, mask=inside, other=0.0), scale, softcap, temperature, CAPPED)
        if MEAN:
            summed += tl.sum(tl.where(inside, x, 0.0))
        higher = tl.maximum(top, tl.max(tl.where(inside, x, -3.0e38)))
        drop = top - higher
        shifted = x - higher
        share = tl.where(inside, tl.exp(shifted), 0.0)
        if ENTROPY:
            weighted = tl.exp(drop) * (weighted + drop * total) + tl.sum(share * shifted)
        total = tl.exp(drop) * total + tl.sum(share)
        top = higher
    log_total = tl.log(total)
    lse = top + log_total
    chosen = _projected(tl.load(logits + tl.load(target + row)), scale, softcap, temperature, CAPPED)
    tl.store(logprobs + row, chosen - lse)
    tl.store(lses + row, lse)
    if ENTROPY:
        tl.store(entropies + row, log_total - weighted / total)
    if MEAN:
        tl.store(mean_logprobs + row, summed / vocab - lse)
    if TOP1:
        tl.store(top1 + row, (chosen >= top).to(tl.uint8))


@triton.jit
@no_type_check
def _gradient_kernel(
    logits,
    target,
    lses,
    entropies,
    of_logprobs,
    of_entropies,
    of_means,
    stride,
    vocab,
    scale,
    softcap,
    temperature,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = _projected(tl.load(logits + column, mask=inside, other=0.0), scale, softcap, temperature, CAPPED)
    of_logprob = tl.load(of_logprobs + row)
    logprob = x - tl.load(lses + row)
    slope = of_logprob
    if MEAN:
        of_mean = tl.load(of_means + row)
        slope += of_mean
    if ENTROPY:
        # dH/dx_j = -p_j (log p_j + H)
        slope += tl.load(of_entropies + row) * (logprob + tl.load(entropies + row))
    slope *= -tl.exp(logprob)
    if MEAN:
        slope += of_mean / vocab
    slope += tl.where(column == tl.load(target + row), of_logprob, 0.0)
    if CAPPED:
        # d tanh: 1 - (capped / softcap)^2, of the capped logits before the temperature
        capped = x * temperature / softcap
        slope *= 1 - capped * capped
    slope *= scale / temperature
    tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=inside)
