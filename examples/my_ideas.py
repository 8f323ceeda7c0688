"""A loss, a reward, a memory technique and a method of one's own, which `walk_researcher.py` trains with.

Each is named by its path: `--loss_type my_ideas.logistic`, `--reward_funcs my_ideas.brief`, `--techniques
my_ideas.HALVES`, `lowtide my_ideas.FOCAL`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.memory.technique import Technique
from lowtide.methods.method import Method, TokenObjective
from lowtide.methods.sft import SFTOptions
from lowtide.methods.shared.rows import Texts
from lowtide.option import NOT_NEGATIVE, option


def logistic(pairs: Any, options: Any) -> Tensor:
    """DPO's own loss, written anew: [pairs]."""
    return F.softplus(-options.beta * (pairs.chosen_ratio - pairs.rejected_ratio))


def brief(completions: list, **rest: Any) -> list[float]:
    """Rewards completions of few characters."""
    return [-float(len(each[0]["content"] if isinstance(each, list) else each)) for each in completions]


def _pack(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float32 and not tensor.is_leaf else tensor


def _unpack(kept: Tensor) -> Tensor:
    return kept.float() if kept.dtype == torch.bfloat16 else kept


HALVES = Technique(
    "activations in halves",
    "half of what a float32 forward keeps for backward",
    options={},
    lowers=("activations",),
    changes="what backward reads is rounded to bfloat16",
    around=lambda site: lambda: torch.autograd.graph.saved_tensors_hooks(_pack, _unpack),
)


@dataclass(kw_only=True)
class FocalOptions(SFTOptions):
    gamma: float = option(2.0, "How little a likely token counts; 0 is cross-entropy.", NOT_NEGATIVE)


def _focal(options: Any, *, aux_coefficient: float = 0.0) -> TokenObjective:
    def loss(stats: Any) -> Tensor:
        return -((1 - stats.logprobs.exp()) ** options.gamma) * stats.logprobs

    return TokenObjective(loss, aux_coefficient=aux_coefficient)


FOCAL = Method("focal", "fine-tuning by the focal loss", FocalOptions, Texts(), _focal)
"""Lin et al. 2017 (arXiv 1708.02002), on tokens."""
