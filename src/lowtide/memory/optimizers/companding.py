"""Moments in 8 bits by companding: numbers are bent before they are rounded, for levels to be dense where moments are.

As in FlashAdamW (FlashOptim, arXiv 2602.23349, section 3.2). A group of neighbours is scaled by its largest number.
The first moment m goes through a softsign, `2 m / (1 + |m|)`, and to one of 255 levels, so that those near zero lie
four times as near to each other as those near the largest. Of the second moment the root is taken, which is what a
step divides by, and rounded to 255 levels. Both ways are arithmetic alone, a few passes over a block.

Not exact: the first moment errs by 0.8% of the group's largest at most, the root of the second by 0.2% of it, or 0.4%
where it is below a level.

It differs from the paper in two things, both of which cost nothing:

- Scales are float32 and groups have 64 numbers, where the paper has 32 with a float16 scale: the same bytes. Below
  6e-8 a float16 is zero, and with it the moments of rare tokens; and it hardly follows a second moment's decay by
  0.999, by which a root changes 2^-11, the precision of float16.
- The root of a second moment is rounded to 1 of 255 at least, not to 0: a step divides by it, and a first moment above
  a second one that was rounded away would move its weight by as much as 1 / eps.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float32
from torch import Tensor

from lowtide.memory.optimizers.eight_bit import EightBitMoment, in_rows

GROUPED = 64
"""Numbers that share a scale."""
LEVELS = {True: 127, False: 255}
"""The largest code of a moment that has signs, and of one that has none."""
TINY = torch.finfo(torch.float32).tiny


class CompandedMoment(EightBitMoment):
    """A block of a moment; its codes are int8 where it has signs, else uint8."""

    scaled: ClassVar[int] = GROUPED

    @staticmethod
    def code_dtype(*, signed: bool) -> torch.dtype:
        return torch.int8 if signed else torch.uint8

    def decoded(self, scales: Tensor) -> Float32[Tensor, " count"]:
        values = in_rows(self.stored.float(), GROUPED)
        if self.signed:  # the inverse of 2 x / (1 + |x|) is y / (2 - |y|)
            values = values.div_(2 * LEVELS[True] - values.abs()).mul_(scales[:, None])
        else:
            values = values.mul_((scales / LEVELS[False])[:, None]).square_()
        return values.view(-1)[: self.stored.numel()]

    def encode(self, values: Float32[Tensor, " count"], scales: Tensor) -> None:
        rows = in_rows(values, GROUPED)
        if self.signed:
            sizes = rows.abs()
            torch.amax(sizes, 1, out=scales)
            sizes += scales.clamp(min=TINY)[:, None]
            codes = torch.div(rows, sizes, out=sizes).mul_(2 * LEVELS[True]).round_()
        else:
            roots = rows.sqrt()
            torch.amax(roots, 1, out=scales)
            codes = roots.mul_((LEVELS[False] / scales.clamp(min=TINY))[:, None]).round_().clamp_(1, LEVELS[False])
        self.stored.copy_(codes.view(-1)[: self.stored.numel()])
