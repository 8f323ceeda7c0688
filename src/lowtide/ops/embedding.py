"""Token embedding whose gradient goes straight where it belongs.

Autograd makes a dense gradient of vocab x hidden for the embedding of a few tokens, and adds it to the one that is
there. Here the rows of the tokens are added to `.grad` in place; with tied weights, to the head's gradient. Where the
weight has hooks, which wait for autograd to bring its gradient, they are added to the head's as that arrives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ops.in_place import (
    add_rows,
    add_rows_on_arrival,
    gradient_in_place,
    lies_here,
    lying_as,
    needs_gradient,
    takes_gradient_in_place,
)
from lowtide.ops.logits.split_vocabulary import Lookup, SharedLookup, SplitVocabulary


def embed_tokens(
    token_ids: Int[Tensor, "*batch"],
    weight: Float[Tensor, "vocab hidden"],
    padding_idx: int | None = None,
    split: SplitVocabulary | None = None,
) -> Float[Tensor, "*batch hidden"]:
    """`F.embedding`, with the same values and the same gradient, added to `weight.grad` in backward.

    Args:
        weight: a parameter; anything else takes the ordinary path.
        padding_idx: a token whose embedding gets no gradient.
        split: the ranks that hold the rows of `weight`, a `DTensor`; they call it together.
    """
    if split is not None:
        return _EmbedSplit.apply(token_ids, weight, padding_idx, split)
    if not (torch.is_grad_enabled() and needs_gradient(weight)):
        return F.embedding(token_ids, weight, padding_idx)
    return _EmbedTokens.apply(token_ids, weight, padding_idx)


class _EmbedTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token_ids: Tensor, weight: Tensor, padding_idx: int | None):
        ctx.save_for_backward(token_ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        ctx.in_place, ctx.shape, ctx.dtype = takes_gradient_in_place(weight), weight.shape, weight.dtype
        return F.embedding(token_ids, weight)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (token_ids,) = ctx.saved_tensors
        grad, rows = _of_tokens(grads[0], token_ids, ctx.padding_idx), token_ids.flatten()
        if ctx.in_place:
            add_rows(gradient_in_place(ctx.weight), rows, grad)
        elif not add_rows_on_arrival(ctx.weight, rows, grad):
            dense = grad.new_zeros(ctx.shape, dtype=ctx.dtype)
            add_rows(dense, rows, grad)
            return None, dense, None
        return None, None, None


class _EmbedSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token_ids: Tensor, weight: Tensor, padding_idx: int | None, split: SplitVocabulary):
        lookup = (SharedLookup if split.same_scores else Lookup)(split, token_ids.flatten())
        ctx.save_for_backward(token_ids)
        ctx.lookup, ctx.weight, ctx.padding_idx = lookup, weight, padding_idx
        return lookup.answered(lies_here(weight).index_select(0, lookup.rows)).view(*token_ids.shape, -1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (token_ids,), lookup, weight = ctx.saved_tensors, ctx.lookup, ctx.weight
        grad = _of_tokens(grads[0], token_ids, ctx.padding_idx)
        in_place = takes_gradient_in_place(weight)
        into = gradient_in_place(weight) if in_place else torch.zeros_like(lies_here(weight))
        add_rows(into, lookup.rows, lookup.returned(grad))
        return None, None if in_place else lying_as(weight, into), None, None


def _of_tokens(grad: Tensor, token_ids: Tensor, padding_idx: int | None) -> Float[Tensor, "tokens hidden"]:
    """The gradient at each token, zero where it is padding."""
    grad = grad.flatten(0, -2)
    return grad if padding_idx is None else grad.masked_fill((token_ids.flatten() == padding_idx)[:, None], 0)
