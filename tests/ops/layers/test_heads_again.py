"""Attention that is given its queries, keys and values again for backward: equal gradients, and none of them kept."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention

from lowtide.ops.layers.heads_again import HeadsAgain

TOKENS, HEADS, KEY_HEADS, WIDTH = 7, 4, 2, 8


def attend(query, key, value):
    heads = (each.transpose(0, 1)[None] for each in (query, key, value))
    out = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(TOKENS, -1)


def heads():
    torch.manual_seed(0)
    return [torch.randn(TOKENS, each, WIDTH) for each in (HEADS, KEY_HEADS, KEY_HEADS)]


def wanted(slopes):
    leaves = [each.requires_grad_() for each in heads()]
    out = attend(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, slopes)


def test_gradients_are_those_of_heads_that_are_kept():
    slopes = torch.randn(TOKENS, HEADS * WIDTH)
    given, calls = heads(), []
    call = HeadsAgain(lambda *each: calls.append(1) or attend(*each), given)
    kept = [StorageWeakRef(each.untyped_storage()) for each in given]
    del given
    assert all(each.expired() for each in kept)
    call.give(heads())
    out, gradients = wanted(slopes)
    assert torch.equal(call.out, out)
    for got, each in zip(call.gradients(slopes), gradients, strict=True):
        assert torch.equal(got, each)
    assert len(calls) == 1


def test_a_call_whose_backward_never_comes_is_let_go():
    given = heads()
    call = HeadsAgain(attend, given)
    out = StorageWeakRef(call.out.untyped_storage())
    del call, given
    assert out.expired()


def test_heads_have_to_be_given():
    call = HeadsAgain(attend, heads())
    with pytest.raises(IndexError):
        call.gradients(torch.ones(TOKENS, HEADS * WIDTH))
