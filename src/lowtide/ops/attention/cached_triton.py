"""The Triton kernels of `ops.attention.cached_kernels`: what a decode step does before and after its attention.

A program of the first has a token, with all its heads; one of the second some heads of tokens. They compute in float32.
`no_type_check` keeps the tests' shape checks off functions that are compiled from their source.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _turned(x, place, other, inside, turns, cos, sin, TURNS: tl.constexpr):
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if TURNS:
        crossed = tl.load(x + other, mask=inside & turns, other=0.0).to(tl.float32)
        value = value * cos + crossed * sin
    return value.to(x.dtype.element_ty)


@triton.jit
@no_type_check
def turn_and_keep(
    cos,
    sin,
    query,
    key,
    value,
    places,
    grouping,
    turned,
    grouped,
    keys,
    values,
    heads,
    kv_heads,
    dim,
    value_dim,
    half,
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    turns = column < 2 * half
    crossed = tl.where(column < half, column + half, column - half)
    if TURNS:
        angle = token * 2 * half + column
        c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        s = tl.where(column < half, -s, s)[None, :]
    else:
        c = 1.0
        s = 0.0
    head = tl.arange(0, HEADS)
    row = token * heads + head
    inside = (head[:, None] < heads) & (column[None, :] < dim)
    start = row[:, None] * dim
    x = _turned(query, start + column[None, :], start + crossed[None, :], inside, turns[None, :], c, s, TURNS)
    if TURNS:
        tl.store(turned + start + column[None, :], x, mask=inside)
    to = tl.load(grouping + row, mask=head < heads, other=0)
    tl.store(grouped + to[:, None] * dim + column[None, :], x, mask=inside)

    head = tl.arange(0, KV_HEADS)
    row = token * kv_heads + head
    to = tl.load(places + row, mask=head < kv_heads, other=0)
    inside = (head[:, None] < kv_heads) & (column[None, :] < dim)
    start = row[:, None] * dim
    x = _turned(key, start + column[None, :], start + crossed[None, :], inside, turns[None, :], c, s, TURNS)
    tl.store(keys + to[:, None] * dim + column[None, :], x, mask=inside)
    column = tl.arange(0, VALUE_DIM)
    inside = (head[:, None] < kv_heads) & (column[None, :] < value_dim)
    x = tl.load(value + row[:, None] * value_dim + column[None, :], mask=inside, other=0.0)
    tl.store(values + to[:, None] * value_dim + column[None, :], x, mask=inside)


@triton.jit
@no_type_check
def merge(lse, grouping, other, other_lse, out, count, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = row < count
    place = tl.load(grouping + row, mask=known, other=0)
    ahead = tl.load(other_lse + place, mask=known, other=0.0) - tl.load(lse + row, mask=known, other=0.0)
    share = tl.sigmoid(ahead.to(tl.float32))[:, None]
    column = tl.arange(0, DIM)
    inside = known[:, None] & (column[None, :] < dim)
    mine = out + row[:, None] * dim + column[None, :]
    one = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(other + place[:, None] * dim + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(mine, (one + share * (two - one)).to(out.dtype.element_ty), mask=inside)
