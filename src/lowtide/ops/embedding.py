"""Token embedding whose gradient goes straight where it belongs.

Autograd makes a dense gradient of vocab x hidden for the embedding of a few tokens, and adds it to the one that is
there. Here the rows of the tokens are added to `.grad` in place; with tied weights, to the head's gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ops.in_place import takes_gradient_in_place
from lowtide.ops.target import target_of


def embed_tokens(
    token_ids: Int[Tensor, "*batch"], weight: Float[Tensor, "vocab hidden"], padding_idx: int | None = None
) -> Float[Tensor, "*batch hidden"]:
    """`F.embedding`, with the same values and the same gradient, added to `weight.grad` in backward.

    Args:
        weight: a parameter without hooks; anything else takes the ordinary path.
        padding_idx: a token whose embedding gets no gradient.
    """
    if not (torch.is_grad_enabled() and takes_gradient_in_place(weight)):
        return F.embedding(token_ids, weight, padding_idx)
    return _EmbedTokens.apply(token_ids, weight, padding_idx)


class _EmbedTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token_ids: Tensor, weight: Tensor, padding_idx: int | None):
        ctx.save_for_backward(token_ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return F.embedding(token_ids, weight)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (token_ids,) = ctx.saved_tensors
        ids, grad = token_ids.flatten(), grads[0].flatten(0, -2)
        if ctx.padding_idx is not None:
            grad = grad.masked_fill((ids == ctx.padding_idx)[:, None], 0)
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad = grad.to(weight.dtype)
        if target_of(grad).kind == "cuda":  # sorts, where index_add_ would add in any order
            weight.grad.index_put_((ids,), grad, accumulate=True)
        else:
            weight.grad.index_add_(0, ids, grad)
        return None, None, None
