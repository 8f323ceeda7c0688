"""The Triton kernels of `ops.layers.layer_kernels`: norms, rotary embeddings and gates of a decoder layer; and that of
`ops.layers.float8`, which puts rows into 8 bits.

Each reads and writes once, in the tensors' own dtypes, and computes in float32. A program of the norms has a row, or
some rows one after the other where it sums the gradient of the weight; one of the rotary kernel has all heads of a
token; one of the gates' kernels a block of entries. `no_type_check` keeps the tests' shape checks off functions that
are compiled from their source.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def rms_norm(x, weight, out, scales, width, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * width + column, (value * scale * factor).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
@no_type_check
def rms_norm_backward(
    grad,
    x,
    scales,
    weight,
    add,
    out,
    sums,
    rows,
    width,
    offset,
    ADD: tl.constexpr,
    TRAINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * width + column
        scale = tl.load(scales + row)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if TRAINED:
            total += slope * value
        slope *= factor
        found = scale * (slope - value * (tl.sum(slope * value) / width))
        if ADD:
            found += tl.load(add + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)
    if TRAINED:
        tl.store(sums + first.to(tl.int64) * width + column, total, mask=inside)


@triton.jit
@no_type_check
def _turned(x, place, inside, cos1, cos2, sin1, sin2, half, BACK: tl.constexpr):
    one = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        left = one * cos1 + two * sin2
        right = two * cos2 - one * sin1
    else:
        left = one * cos1 - two * sin1
        right = two * cos2 + one * sin2
    tl.store(x + place, left.to(x.dtype.element_ty), mask=inside)
    tl.store(x + place + half, right.to(x.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def rotate(
    cos,
    sin,
    query,
    key,
    heads,
    kv_heads,
    dim,
    half,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    within = column < half
    one = token * 2 * half + column
    two = one + half
    cos1 = tl.load(cos + one, mask=within, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + two, mask=within, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + one, mask=within, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + two, mask=within, other=0.0).to(tl.float32)[None, :]
    head = tl.arange(0, HEADS)
    place = token * heads * dim + head[:, None] * dim + column[None, :]
    inside = (head[:, None] < heads) & within[None, :]
    _turned(query, place, inside, cos1, cos2, sin1, sin2, half, BACK)
    head = tl.arange(0, KV_HEADS)
    place = token * kv_heads * dim + head[:, None] * dim + column[None, :]
    inside = (head[:, None] < kv_heads) & within[None, :]
    _turned(key, place, inside, cos1, cos2, sin1, sin2, half, BACK)


@triton.jit
@no_type_check
def _active(value, TANH: tl.constexpr):
    """The activation and its slope: `value` times a share, which is a sigmoid (tanh(x) = 2 sigmoid(2 x) - 1)."""
    if TANH:
        square = value * value
        share = tl.sigmoid(1.5957691216057308 * value * (1 + 0.044715 * square))  # 2 sqrt(2 / pi)
        inner = 1.5957691216057308 * (1 + 0.134145 * square)
        return value * share, share + value * share * (1 - share) * inner
    else:
        share = tl.sigmoid(value)
        return value * share, share + value * share * (1 - share)


@triton.jit
@no_type_check
def gate_product(gate, up, out, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    active, _ = _active(value, TANH)
    tl.store(out + place, (active * other).to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def gate_backward(grad, gate, up, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    active, steep = _active(value, TANH)
    tl.store(grad + place, (active * other).to(grad.dtype.element_ty), mask=inside)
    tl.store(gate + place, (slope * other * steep).to(gate.dtype.element_ty), mask=inside)
    tl.store(up + place, (slope * active).to(up.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _to_e4m3(value):
    """The nearest number of e4m3, of two as near the even one, in float32: a cast of it is exact, and the same on all
    cards and in Triton's interpreter. Below 2**-6 the numbers are 2**-9 apart; above, 3 bits follow the leading one."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (value + 24576.0) - 24576.0  # 1.5 * 2**14, whose neighbours are 2**-9 apart
    return tl.where(tl.abs(value) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
@no_type_check
def in_rows(x, factors, codes, scales, width, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if FACTORS:
        value *= tl.load(factors + column, mask=inside, other=0.0)
    least = tl.max(tl.abs(value)) / 448  # the largest number of e4m3
    power = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000  # the next power of two
    scale = tl.where(least == 0, 1.0, power.to(tl.float32, bitcast=True))
    tl.store(codes + row * width + column, _to_e4m3(value / scale).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
