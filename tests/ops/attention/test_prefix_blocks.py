"""Attention to a prefix and to a segment's own keys as two blocks, against dense attention of each segment."""

import pytest
import torch

from lowtide.ops.attention import prefix_blocks
from lowtide.ops.attention.attention_plan import Rules, Sight
from lowtide.ops.attention.prefix_blocks import by_prefix_blocks
from lowtide.ops.attention.varlen_attention import AttentionPlan, varlen_attention
from lowtide.ops.target import planning_for
from tests.support.references.dense_attention import LENGTHS, dense, ragged


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("shape", ["prefix", "tree"])
def test_equals_dense_attention_of_each_segment(shape, width, monkeypatch):
    monkeypatch.setattr(prefix_blocks, "AREA", 0)
    batch = ragged(*LENGTHS[shape])
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, width))
    tensors = [torch.randn(batch.tokens, *size, dtype=torch.float64, generator=generator) for size in sizes]
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    plan = AttentionPlan.build(batch)
    out = varlen_attention(*ours, plan, scale=0.3)
    assert by_prefix_blocks(ours[0], plan, Rules(0.3))
    expected = dense(*theirs, batch, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    for each in (out, expected):
        (each * weights).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-8, atol=1e-8)


def test_long_segments_behind_long_prefixes_are_computed_so_and_others_are_not():
    long = AttentionPlan.build(ragged([900, 200, 200], [-1, 0, 0], [-1, 900, 500]))
    query, plain = torch.zeros(1300, 2, 8), Rules(0.3)
    assert by_prefix_blocks(query, long, plain)
    for other in (
        plain._replace(causal=False),
        plain._replace(sight=Sight(window=5)),
        plain._replace(softcap=2.0),
        plain._replace(sinks=torch.zeros(2)),
        plain._replace(dropout=0.1),
        plain._replace(bias=torch.zeros(2, 3)),
    ):
        assert not by_prefix_blocks(query, long, other)
    assert not by_prefix_blocks(query.bfloat16(), long, plain)
    with planning_for("cuda", (9, 0)):
        assert not by_prefix_blocks(query, long, plain)
    for lengths, prefix in (([900, 20, 20, 20, 20], [-1, 0, 0, 0, 0]), ([900, 900], [-1, -1])):
        plan = AttentionPlan.build(ragged(lengths, prefix))
        assert not by_prefix_blocks(torch.zeros(sum(lengths), 2, 8), plan, plain)
