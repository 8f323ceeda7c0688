"""Ragged attention against dense attention of each segment alone, written out with an explicit mask."""

import pytest
import torch

from lowtide.ops.varlen_attention import AttentionPlan, varlen_attention
from lowtide.ragged import RaggedBatch

LENGTHS = {
    "equal": ([5, 5, 5], [-1, -1, -1]),
    "unequal": ([1, 30, 2, 7, 31, 19, 70], [-1] * 7),
    "prefix": ([6, 3, 9, 1, 4, 4, 2], [-1, 0, 0, -1, -1, 4, 4]),
    "long": ([50, 2100, 3], [-1, 0, -1]),
}
VARIANTS = {
    "causal": {},
    "scale": {"scale": 0.3},
    "window": {"window": 4},
    "chunk": {"chunk": 5},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, 4, dtype=torch.float64)},
    "all": {"window": 3, "softcap": 2.0, "sinks": torch.ones(4, dtype=torch.float64), "scale": 0.7},
}


def dense(q, k, v, batch, scale=None, window=None, chunk=None, softcap=None, sinks=None):
    """One segment at a time, by the textbook. [tokens, heads, dim]"""
    outputs = []
    for part in batch.segments:
        spans = [slice(part.start, part.stop)]
        if part.prefix >= 0:
            before = batch.segments[part.prefix]
            spans.insert(0, slice(before.start, before.stop))
        keys = torch.cat([k[s] for s in spans]).repeat_interleave(2, dim=1)
        values = torch.cat([v[s] for s in spans]).repeat_interleave(2, dim=1)
        queries = q[part.start : part.stop]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (scale or q.shape[-1] ** -0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        ahead = len(keys) - len(queries)
        position = torch.arange(len(queries))[:, None] + ahead
        visible = torch.arange(len(keys))[None] <= position
        if window is not None:
            visible &= torch.arange(len(keys))[None] > position - window
        if chunk is not None:
            visible &= torch.arange(len(keys))[None] // chunk == position // chunk
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.view(-1, 1, 1).expand(-1, len(queries), 1)
            weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", LENGTHS)
def test_equals_dense_attention_of_each_segment(shape, variant):
    if shape == "long" and variant not in ("causal", "window"):
        pytest.skip("the long case is there for the blocks of queries")
    lengths, prefix = LENGTHS[shape]
    row = [sum(p == -1 for p in prefix[: i + 1]) - 1 for i in range(len(prefix))]
    batch = RaggedBatch.from_segments([[1] * n for n in lengths], prefix=prefix, row=row)
    torch.manual_seed(0)
    tensors = [torch.randn(batch.tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    plan = AttentionPlan.build(batch)

    out = varlen_attention(*ours, plan, **VARIANTS[variant])
    expected = dense(*theirs, batch, **VARIANTS[variant])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)

    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-8, atol=1e-8)


def test_equal_lengths_are_not_moved():
    batch = RaggedBatch.from_segments([[1] * 4] * 6)
    plan = AttentionPlan.build(batch)
    assert plan.queries is None
    assert plan.keys is None
    assert len(plan.groups) == 1


def test_near_lengths_share_a_group():
    batch = RaggedBatch.from_segments([[1] * n for n in range(100, 120)])
    plan = AttentionPlan.build(batch)
    assert len(plan.groups) < 4
    assert sum(group.n for group in plan.groups) == 20
