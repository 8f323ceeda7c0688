"""Dropout whose bits are drawn again, against torch's own with the same entries kept."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.varlen_attention import varlen_attention
from lowtide.ops.dropout import dropout, written_attention
from tests.support.references.dense_attention import ragged

RATE = 0.3


def kept_weights(mask: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """What a call after the same seed multiplies weights by: seen by attention of equal scores over unit values."""
    n, heads, queries, keys = shape
    nothing = (
        torch.zeros(n, heads, queries, 1, dtype=torch.float64),
        torch.zeros(n, heads, keys, 1, dtype=torch.float64),
    )
    units = torch.eye(keys, dtype=torch.float64).expand(n, heads, keys, keys)
    weights = written_attention(*nothing, units, mask, 1.0, RATE)
    seen = torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask
    return weights * seen.sum(-1, keepdim=True)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_that_of_the_weights_that_were_kept(masked):
    n, heads, queries, keys = 3, 2, 7, 7
    mask = torch.ones(queries, keys, dtype=torch.bool).tril() if masked else None
    torch.manual_seed(0)
    tensors = [torch.randn(n, heads, 7, dim, dtype=torch.float64) for dim in (5, 5, 4)]
    ours, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    torch.manual_seed(1)
    kept = kept_weights(mask, (n, heads, queries, keys))
    torch.manual_seed(1)
    out = written_attention(*ours, mask=mask, scale=0.5, rate=RATE)

    q, k, v = theirs
    scores = q @ k.mT * 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(-1) * kept) @ v
    torch.testing.assert_close(out, expected)
    slopes = torch.randn_like(out)
    out.backward(slopes)
    expected.backward(slopes)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad)


def test_the_rate_is_met_and_the_mean_stays():
    torch.manual_seed(0)
    x = torch.ones(1_000_000, requires_grad=True)
    found = dropout(x, 0.1)
    assert (found.detach() == 0).float().mean() == pytest.approx(0.1, abs=1e-3)
    assert found.detach().mean() == pytest.approx(1, abs=1e-3)
    found.sum().backward()
    torch.testing.assert_close(x.grad, found.detach())  # of ones: the same entries, by the same factor


def test_everything_may_be_dropped():
    assert not dropout(torch.ones(10), 1.0).any()


def test_the_generator_goes_on_after_backward():
    x = torch.ones(100, requires_grad=True)
    torch.manual_seed(0)
    found = dropout(x, RATE)
    expected = torch.rand(3)
    torch.manual_seed(0)
    found = dropout(x, RATE)
    found.sum().backward()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_rows_recomputed_drop_the_same(causal):
    batch = ragged([5, 5, 9, 30], [-1] * 4)
    torch.manual_seed(0)
    tensors = [torch.randn(batch.tokens, heads, 8) for heads in (4, 2, 2)]
    found = []
    for recomputed in (False, True):
        own = [x.clone().requires_grad_() for x in tensors]
        plan = AttentionPlan.build(batch)

        def attend(*qkv: torch.Tensor, plan: AttentionPlan = plan) -> torch.Tensor:
            return varlen_attention(*qkv, plan=plan, dropout=RATE, causal=causal)

        torch.manual_seed(2)
        out = checkpoint(attend, *own, use_reentrant=False) if recomputed else attend(*own)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in own)])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
    assert not torch.equal(found[0][0], varlen_attention(*tensors, plan=AttentionPlan.build(batch), causal=causal))
