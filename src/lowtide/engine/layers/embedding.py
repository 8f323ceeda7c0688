"""Lets a model's token embedding add its gradient in place (see `ops.embedding`).

Rows of some tokens that PEFT trains (`trainable_token_indices`) are looked up by themselves. PEFT puts them into a copy
of the whole matrix in each forward, which takes vocab x hidden, and which sharded weights do not allow.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowtide.compat.peft import rows_of_tokens, tokens_switched_on, trained_tokens, under_trained_tokens
from lowtide.compat.torch import FakeTensor
from lowtide.engine.weights.sharded.split_vocabulary import split_of
from lowtide.ops.embedding import embed_tokens


def install_embedding(model: PreTrainedModel) -> None:
    """Replaces the forward of the input embedding, where it is a plain one or Gemma's scaled one."""
    whole: Any = model.get_input_embeddings()
    module = under_trained_tokens(whole)
    if (layer := trained_tokens(whole)) is not None and isinstance(module, nn.Embedding):
        layer.forward = types.MethodType(_with_trained_rows, layer)
    if "forward" in vars(module):
        return  # it is there already
    plain = type(module) is nn.Embedding
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    if not (plain or scaled) or module.sparse or module.scale_grad_by_freq or module.max_norm is not None:
        return

    def forward(self: Any, input: Tensor) -> Tensor:
        out = embed_tokens(input, self.weight, self.padding_idx, split_of(self.weight))
        if plain:
            return out
        scale = self.embed_scale
        return out * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)

    module.forward = types.MethodType(forward, module)
    if isinstance(module.weight, FakeTensor):
        return  # no values to compare, only shapes to plan with
    probe = torch.arange(min(8, module.num_embeddings), device=module.weight.device)
    if not torch.equal(module.forward(probe), type(module).forward(module, probe)):
        del module.forward  # an embedding that does more than we know keeps its own way


def _with_trained_rows(layer: Any, input: Tensor) -> Tensor:
    """The embeddings of tokens, those of trained rows in place of the base's."""
    out = layer.base_layer(input) if (on := tokens_switched_on(layer)) else type(layer).forward(layer, input)
    for adapter in on:
        tokens, rows = rows_of_tokens(layer, adapter)
        place = torch.full((layer.base_layer.num_embeddings,), -1, device=input.device)
        place[torch.tensor(tokens, device=input.device)] = torch.arange(len(tokens), device=input.device)
        found, padding = place[input], layer.base_layer.padding_idx
        unmoved = tokens.index(padding) if padding in tokens else None
        own = F.embedding(found.clamp(min=0), rows.to(out.dtype), unmoved)
        scale = getattr(layer.base_layer, "embed_scale", None)
        if scale is not None:
            own = own * (scale.to(own.dtype) if isinstance(scale, Tensor) else scale)
        out = torch.where((found >= 0)[..., None], own, out)
    return out
