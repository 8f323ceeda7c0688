"""Tensors in 8 bits, each block of 256 numbers scaled by its largest: optimizer moments at a quarter of their size.

Block-wise dynamic quantization (Dettmers et al., arXiv 2110.02861): a code stands for one of 256 levels between -1 and
1, or 0 and 1 for numbers that are never negative. They are dense where moments are: each power of ten down to 1e-6 has
half as many as the next larger one, spread evenly.

Not exact: a number comes back as the level nearest to it, within 1% of the block's largest. The nearest one is looked
up by the upper 16 bits of the number, since searching among the levels takes a CPU a hundred times as long.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float32, Shaped, UInt8
from torch import Tensor

from lowtide.compat.torch import without_modes

SCALED = 256
"""Numbers that share a scale."""
POWERS = 7
"""Powers of ten that have levels, from 1 down."""


@dataclass(frozen=True)
class EightBitMoment:
    """A block of a moment."""

    stored: Tensor
    """[count]: the values, or their codes."""
    scales: Tensor | None
    """[blocks]: of the codes; None where there are values."""
    signed: bool
    scaled: ClassVar[int] = SCALED

    @classmethod
    def blocks(cls, moment: Tensor, scales: Tensor | None, size: int, *, signed: bool) -> list[Self]:
        """A moment in blocks of `size` numbers, which is a multiple of `scaled`."""
        stored = moment.view(-1).split(size)
        parts = [None] * len(stored) if scales is None else scales.split(size // cls.scaled)
        return [cls(block, scale, signed) for block, scale in zip(stored, parts, strict=True)]

    @classmethod
    def zeros(
        cls, count: int, device: torch.device, *, signed: bool
    ) -> tuple[Shaped[Tensor, " count"], Float32[Tensor, " blocks"]]:
        """(codes, scales) of as many zeros."""
        codes = torch.zeros(count, dtype=cls.code_dtype(signed=signed), device=device)
        return codes, torch.zeros(-(-count // cls.scaled), device=device)

    @staticmethod
    def code_dtype(*, signed: bool) -> torch.dtype:
        """Of the codes of a moment that has signs, or has none."""
        return torch.uint8

    def read(self) -> Float32[Tensor, " count"]:
        """The values: those that are kept, or what codes stand for, in memory of its own."""
        return self.stored if self.scales is None else self.decoded(self.scales)

    def write(self, values: Float32[Tensor, " count"]) -> None:
        """Keeps what was read and then changed."""
        if self.scales is not None:
            self.encode(values, self.scales)

    def decoded(self, scales: Tensor) -> Float32[Tensor, " count"]:
        return dequantize(self.stored, scales, signed=self.signed)

    def encode(self, values: Float32[Tensor, " count"], scales: Tensor) -> None:
        quantize_(values, self.stored, scales, signed=self.signed)


def quantize_(
    values: Float32[Tensor, " count"],
    codes: UInt8[Tensor, " count"],
    scales: Float32[Tensor, " blocks"],
    *,
    signed: bool,
) -> None:
    """Writes values as codes and scales."""
    blocks = in_rows(values, SCALED)
    torch.amax(blocks.abs(), 1, out=scales)
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    upper = scaled.view(-1)[: codes.numel()].to(torch.bfloat16).view(torch.int16).int() + 2**15
    torch.index_select(_nearest(signed, values.device), 0, upper, out=codes)


def dequantize(
    codes: UInt8[Tensor, " count"], scales: Float32[Tensor, " blocks"], *, signed: bool
) -> Float32[Tensor, " count"]:
    """The values that codes and scales stand for, in memory of their own."""
    values = _levels(signed, codes.device).index_select(0, codes.int())
    return in_rows(values, SCALED).mul_(scales[:, None]).view(-1)[: codes.numel()]


@functools.cache
def _levels(signed: bool, device: torch.device) -> Float32[Tensor, " 256"]:
    """What the codes stand for, in ascending order."""
    with without_modes():  # what is kept has values, even if it is a trace that asks first
        found = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
        for power in range(POWERS):
            edges = torch.linspace(0.1, 1, 2 ** (POWERS - 1 - power + (not signed)) + 1, dtype=torch.float32)
            middles = (edges[1:] + edges[:-1]) / 2 * 10.0**-power
            found += [middles, -middles] if signed else [middles]
        return torch.cat(found).sort().values.to(device)


@functools.cache
def _nearest(signed: bool, device: torch.device) -> UInt8[Tensor, " 65536"]:
    """The code of the nearest level to each bfloat16 number, in the order of their bits as signed integers."""
    levels = _levels(signed, torch.device("cpu"))
    with without_modes():
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
        return torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2).to(device, torch.uint8)


def in_rows(values: Float32[Tensor, " count"], width: int) -> Float32[Tensor, "blocks width"]:
    """The values in rows of one scale, the last filled up with zeros."""
    missing = -values.numel() % width
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, width)
