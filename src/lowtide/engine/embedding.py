"""Lets a model's token embedding add its gradient in place (see `ops.embedding`)."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowtide.compat.torch import FakeTensor
from lowtide.engine.weights.split_vocabulary import split_of
from lowtide.ops.embedding import embed_tokens


def install_embedding(model: PreTrainedModel) -> None:
    """Replaces the forward of the input embedding, where it is a plain one or Gemma's scaled one."""
    module: Any = model.get_input_embeddings()
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
