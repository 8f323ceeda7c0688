"""The Triton kernel of `ops.logits.drawing`: an entry of each row of scores, drawn or the likeliest.

A program has a row, which it reads three times: for the largest score, for the sum of what scores are exponents of, and
up to the entry at which that sum passes its random number's share of it. Sums are in float64. `no_type_check` keeps the
tests' shape checks off functions that are compiled from their source.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _uniform(key, counter):
    """`ops.counter_random.uniforms`: SplitMix64 in wrapping int64 arithmetic."""
    z = key + (counter + 1) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
@no_type_check
def pick(scores, keys, counters, places, logprobs, entries, DRAWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = scores + row * entries
    column = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    place = tl.full([], 0, tl.int32)
    for first in range(0, entries, BLOCK):
        value = tl.load(start + first + column, mask=first + column < entries, other=float("-inf")).to(tl.float32)
        largest = tl.max(value, 0)
        nearest = tl.min(tl.where(value == largest, column, BLOCK - 1), 0)
        place = tl.where(largest > top, first + nearest, place)
        top = tl.maximum(top, largest)
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, entries, BLOCK):
        value = tl.load(start + first + column, mask=first + column < entries, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(value - top).to(tl.float64), 0)
    if DRAWS:
        wanted = _uniform(tl.load(keys + row), tl.load(counters + row)) * total
        wanted = tl.minimum(wanted, total * 0.9999999999999998)  # below it, something is always found
        before = tl.full([], 0.0, tl.float64)
        found = tl.full([], 0, tl.int32)
        for first in range(0, entries, BLOCK):
            value = tl.load(start + first + column, mask=first + column < entries, other=float("-inf")).to(tl.float32)
            share = tl.exp(value - top).to(tl.float64)
            after = before + tl.sum(share, 0)
            ends = before + tl.cumsum(share, 0)
            last = tl.max(tl.where(share > 0, column, 0), 0)  # the sum of a block may be rounded otherwise
            inside = tl.minimum(tl.sum((ends <= wanted).to(tl.int32), 0), last)
            place = tl.where((found == 0) & (after > wanted), first + inside, place)
            found = tl.where(after > wanted, 1, found)
            before = after
    chosen = tl.load(start + place).to(tl.float32)
    tl.store(places + row, place.to(tl.int64))
    tl.store(logprobs + row, ((chosen - top).to(tl.float64) - tl.log(total)).to(tl.float32))
