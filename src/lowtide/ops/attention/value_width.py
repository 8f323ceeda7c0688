"""Values that are narrower than keys, as those of latent attention are (DeepSeek, Kimi, GLM), for kernels that want one
width: they are filled up with zeros, which gather zeros, and these are left out of the result. Nothing else changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

P = ParamSpec("P")


def widened(value: Float[Tensor, "*places width"], width: int) -> Float[Tensor, "*places wide"]:
    """Values with zeros at their end, as wide as keys."""
    return F.pad(value, (0, width - value.shape[-1]))


def of_one_width(
    attend: Callable[Concatenate[Tensor, Tensor, Tensor, P], Tensor],
) -> Callable[Concatenate[Tensor, Tensor, Tensor, P], Tensor]:
    """Attention (query, key, value, ..) by a kernel that wants values as wide as keys, for narrower ones too."""

    @functools.wraps(attend)
    def run(query: Tensor, key: Tensor, value: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        own, wide = value.shape[-1], key.shape[-1]
        if own >= wide:
            return attend(query, key, value, *args, **kwargs)
        return attend(query, key, widened(value, wide), *args, **kwargs)[..., :own]

    return run
