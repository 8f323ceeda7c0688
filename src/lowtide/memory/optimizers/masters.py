"""float32 masters, split into the bfloat16 weights that the passes use and what the weights lack of them.

Three ways. `split_master_` keeps all of the master: 16 bits beside the weight. `split_master_24_` keeps 8 bits beside
the weight: the master is a float of 24 bits. `round_stochastically_` keeps nothing beside it.

Of 24 bits: a master is a float32 number whose last 8 bits are zero, and the remainder counts how many such numbers lie
between it and its weight. FlashAdamW's weight splitting (arXiv 2602.23349, section 3.1) scales the rounding error by
half a unit in the weight's last place to 255 levels; here are 256 of them, by integer arithmetic alone. Of two weights
that are equally near, the one with the larger magnitude is taken, so that remainders are -128 to 127 and a master that
was split comes back bit by bit. A float32 number is rounded to the nearest master, to even between two: an error of
2^-17 of its power of two at most, where the paper's is a little more. NaN stays NaN, infinity stays infinity.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Float32, Int8, Int16
from torch import Tensor

TIE = 0x8000
"""Half of the distance between two bfloat16 numbers, counted in float32 numbers."""
MASTER_24 = 1 << 8
"""The distance between two masters of 24 bits, counted in float32 numbers."""


def joined_master(
    weight: BFloat16[Tensor, " *shape"], remainder: Int16[Tensor, " *shape"], exp_avg_sq: Float32[Tensor, " *shape"]
) -> Float32[Tensor, " *shape"]:
    """The master, in memory of its own."""
    bits = weight.float().view(torch.int32)
    bits += remainder
    bits.sub_(exp_avg_sq.view(torch.int32) >> 31, alpha=2 * TIE)  # the shift gives -1 for a sign, else 0
    return bits.view(torch.float32)


def split_master_(
    master: Float32[Tensor, " *shape"],
    weight: BFloat16[Tensor, " *shape"],
    remainder: Int16[Tensor, " *shape"],
    exp_avg_sq: Float32[Tensor, " *shape"],
) -> None:
    """Splits the master into weight, remainder and the sign of the second moment. NaN stays NaN, whatever remains."""
    weight.copy_(master)
    left = master.view(torch.int32) - weight.float().view(torch.int32)
    remainder.copy_(left)  # 0x8000 wraps to -0x8000
    exp_avg_sq.copysign_(0.5 - (left == TIE).float())


def joined_master_24(
    weight: BFloat16[Tensor, " *shape"], remainder: Int8[Tensor, " *shape"]
) -> Float32[Tensor, " *shape"]:
    """The master of 24 bits, as a float32 number in memory of its own."""
    return weight.float().view(torch.int32).add_(remainder, alpha=MASTER_24).view(torch.float32)


def split_master_24_(
    master: Float32[Tensor, " *shape"], weight: BFloat16[Tensor, " *shape"], remainder: Int8[Tensor, " *shape"]
) -> None:
    """Splits the master, rounded to 24 bits, into weight and remainder."""
    bits = master.view(torch.int32)
    number = (bits >> 8).bitwise_and_(1).add_(bits).add_(MASTER_24 // 2 - 1)
    number >>= 8  # the master's, in the order of masters
    remainder.copy_(number)  # the last 8 bits, as a signed number
    number += MASTER_24 // 2
    number >>= 8
    weight.copy_(number.to(torch.int16).view(torch.bfloat16))
    missing = master.isnan()
    weight.masked_fill_(missing, torch.nan)
    remainder.masked_fill_(missing, 0)


def round_stochastically_(
    master: Float32[Tensor, " *shape"], weight: BFloat16[Tensor, " *shape"], generator: torch.Generator | None
) -> None:
    """The weight becomes one of the two neighbours of the master, each the likelier the nearer it is."""
    noise = torch.randint(2 * TIE, master.shape, generator=generator, dtype=torch.int32, device=master.device)
    upper = (noise + master.view(torch.int32)) >> 16
    weight.copy_(upper.to(torch.int16).view(torch.bfloat16))
    weight.masked_fill_(master.isnan(), torch.nan)
