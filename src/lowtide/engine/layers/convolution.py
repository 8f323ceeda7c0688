"""Short convolutions (LFM2) that stay inside their segment, and reach back into its prefix.

Transformers' own run over the whole row of tokens, so that the first tokens of a segment would see the end of the one
before. With a plan, each tap reads the token so many places back in the same segment or its prefix, and zero where
there is none. It is the instances of a model that are changed: the family's module and classes stay as they are.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowtide.ops.attention.attention_plan import PLAN, AttentionPlan, Sight
from lowtide.ops.attention.chained_attention import joined

FAMILIES = {"lfm2"}
"""Model types whose only reach across tokens beside attention is a gated short convolution."""
KIND = "ShortConv"
"""How the names of its classes end."""


def install_convolution(model: PreTrainedModel) -> None:
    """Gives a model's short convolutions a forward that knows segments; without a plan it is their class's own."""
    if model.config.get_text_config().model_type in FAMILIES:
        for module in model.modules():
            if type(module).__name__.endswith(KIND):
                module.forward = types.MethodType(_forward, module)


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What `Lfm2ShortConv.forward` computes, with the taps of the plan. `hidden_states` [1, tokens, hidden]."""
    plan = kwargs.pop(PLAN, None)
    if plan is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    gate_in, gate_out, x = self.in_proj(hidden_states.squeeze(0)).chunk(3, dim=-1)
    gated, weight, bias = gate_in * x, self.conv.weight.squeeze(1), self.conv.bias
    x = gated.to(weight.dtype)
    if plan.piece is not None:
        (x,), plan = joined(self, (x,), plan, Sight(window=weight.shape[1]))
    out = segment_convolution(x, weight, plan)
    out = out if bias is None else out + bias
    return self.out_proj(gate_out * out.to(gated.dtype))[None]


def segment_convolution(x: Tensor, weight: Tensor, plan: AttentionPlan) -> Tensor:
    """Depthwise causal convolution. `x` [keys, hidden], `weight` [hidden, taps]; the last tap is the token itself."""
    taps = weight.shape[1]
    out = x[: plan.tokens] * weight[:, taps - 1]
    for back in range(1, taps):
        source = plan.tokens_back(back)
        earlier = x.index_select(0, source.clamp(min=0))
        out = out + torch.where(source[:, None] >= 0, earlier, 0) * weight[:, taps - 1 - back]
    return out
