"""Random numbers by counting: each is a hash of a key and a counter, so that it depends on nothing else.

SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) in wrapping int64
arithmetic, which every device has, and the same in plain Python for the keys.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ops.float64 import WITHOUT_FLOAT64

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_WORD = (1 << 64) - 1


def stream_key(*numbers: int) -> int:
    """The int64 that keys a stream of random numbers of its own for each tuple of integers."""
    key = 0
    for number in numbers:
        key = _mixed_integer((key + (number & _WORD) * GOLDEN + GOLDEN) & _WORD)
    return _signed(key)


def uniforms(keys: Int[Tensor, " rows"], counters: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """The number of each stream at a counter: in [0, 1), in steps of 2^-53 (2^-24 where a device has no float64)."""
    bits = _mixed(keys + (counters + 1) * _signed(GOLDEN))
    if bits.device.type in WITHOUT_FLOAT64:
        return _shifted(bits, 40).to(torch.float32) * 2.0**-24
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def _mixed(z: Tensor) -> Tensor:
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z ^ _shifted(z, SHIFTS[-1])


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shifted to the right with zeros coming in: torch's own shift repeats the sign."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _mixed_integer(z: int) -> int:
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        z = ((z ^ (z >> shift)) * factor) & _WORD
    return z ^ (z >> SHIFTS[-1])


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
