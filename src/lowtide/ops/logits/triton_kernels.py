"""The Triton kernels of `ops.logits.triton_rows`: one reads rows of logits, one overwrites them.

The first goes over the vocabulary once, with a running maximum and sums that are rescaled when it grows (online
softmax, Milakov and Gimelshein, arXiv 1805.02867). The second takes the log-sum-exp as known and is independent for
each block of a row. A row's statistics are float32 scalars, its blocks of logits are read in their own dtype;
`no_type_check` keeps the tests' shape checks off functions that are compiled from their source.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _projected(raw, scale, softcap, temperature, CAPPED: tl.constexpr):
    x = raw.to(tl.float32) * scale
    if CAPPED:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # tanh, which the language itself does not have
    return x / temperature


@triton.jit
@no_type_check
def stats(
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
def gradient(
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
