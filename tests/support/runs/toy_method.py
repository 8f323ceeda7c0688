"""A method in one file, as CONTRIBUTING describes it: likelihood above a floor, which leaves easy tokens alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.methods.method import Method, TokenObjective
from lowtide.methods.sft import SFTOptions
from lowtide.methods.shared.rows import Texts
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.option import NOT_NEGATIVE, option


@dataclass(kw_only=True)
class FloorOptions(SFTOptions):
    """The options of the method, beside those of its data."""

    learning_rate: float = option(3e-4, "The initial learning rate.")
    floor: float = option(0.1, "Loss of a token, in nats, below which it is left alone.", NOT_NEGATIVE)


def objective(options: FloorOptions, *, aux_coefficient: float = 0.0) -> TokenObjective:
    """max(-log p - floor, 0) of each scored token, averaged."""

    def loss(stats: TokenStats) -> Tensor:
        return torch.relu(-stats.logprobs - options.floor)

    return TokenObjective(loss, aux_coefficient=aux_coefficient)


METHOD = Method("floor", "likelihood above a floor", FloorOptions, Texts(), objective)
