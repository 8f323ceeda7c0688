"""Short convolutions (LFM2) that stay inside their segment, and reach back into its prefix.

Transformers' fallback for `causal_conv1d_fn` runs over the whole row of tokens, so that the first tokens of a segment
would see the end of the one before. With a plan, each tap reads the token so many places back in the same segment or
its prefix, and zero where there is none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from lowtide.engine.attention import PLAN
from lowtide.ops.varlen_attention import AttentionPlan

FAMILIES = {"lfm2"}
"""Model types whose only reach across tokens beside attention is `causal_conv1d_fn`."""


def install_convolution(model: PreTrainedModel) -> None:
    """Replaces the convolution of the model's family by one that knows segments; without a plan it is the old one."""
    if model.config.get_text_config().model_type not in FAMILIES:
        return
    family: Any = sys.modules[type(model).__module__]
    inner = family.causal_conv1d_fn
    if getattr(inner, "__lowtide__", False):
        return

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        plan = kwargs.pop(PLAN, None)
        if plan is None:
            return inner(hidden_states, weight, bias, activation, **kwargs)
        out = segment_convolution(hidden_states[0].t().to(weight.dtype), weight, plan)
        out = out if bias is None else out + bias
        out = out if activation is None else ACT2FN[activation](out)
        return out.t()[None].to(hidden_states.dtype)

    causal_conv1d_fn.__lowtide__ = True  # type: ignore[attr-defined]
    family.causal_conv1d_fn = causal_conv1d_fn


def segment_convolution(x: Tensor, weight: Tensor, plan: AttentionPlan) -> Tensor:
    """Depthwise causal convolution. `x` [tokens, hidden], `weight` [hidden, taps]; the last tap is the token itself."""
    taps = weight.shape[1]
    out = x * weight[:, taps - 1]
    for back in range(1, taps):
        source = plan.tokens_back(back)
        earlier = x.index_select(0, source.clamp(min=0))
        out = out + torch.where(source[:, None] >= 0, earlier, 0) * weight[:, taps - 1 - back]
    return out
