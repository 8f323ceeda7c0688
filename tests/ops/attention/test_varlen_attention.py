"""Ragged attention against dense attention of each segment alone, written out with an explicit mask."""

import pytest
import torch

from lowtide.ops.attention.attention_grouped import grouping
from lowtide.ops.attention.attention_plan import Rules, Sight
from lowtide.ops.attention.varlen_attention import BACKENDS, AttentionPlan, varlen_attention
from lowtide.ops.target import planning_for
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.references.dense_attention import LENGTHS, VARIANTS, dense, ragged


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", slow_but(LENGTHS.keys() - {"long"}, LENGTHS))
def test_equals_dense_attention_of_each_segment(shape, variant, causal):
    if shape == "long" and variant not in ("causal", "window"):
        pytest.skip("the long case is there for the blocks of queries")
    batch = ragged(*LENGTHS[shape])
    torch.manual_seed(0)
    tensors = [torch.randn(batch.tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    plan = AttentionPlan.build(batch)

    out = varlen_attention(*ours, plan, **VARIANTS[variant], causal=causal)
    expected = dense(*theirs, batch, **VARIANTS[variant], causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)

    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-8, atol=1e-8)


def test_equal_lengths_are_not_moved():
    batch = RaggedBatch.from_segments([[1] * 4] * 6)
    found = grouping(AttentionPlan.build(batch))
    assert found.queries is None
    assert found.keys is None
    assert len(found.groups) == 1


def test_near_lengths_share_a_group():
    batch = RaggedBatch.from_segments([[1] * n for n in range(100, 120)])
    found = grouping(AttentionPlan.build(batch))
    assert len(found.groups) < 4
    assert sum(group.n for group in found.groups) == 20


def test_segments_that_are_not_causal_go_to_a_kernel_that_knows_them():
    q, k, v = (torch.zeros(12, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with planning_for("cuda", (9, 0)):
        rules = Rules(1.0, Sight(window=2), causal=False)
        assert BACKENDS["varlen"].why_not(q, k, v, rules) is None
        assert "causal segments" in (BACKENDS["flex"].why_not(q, k, v, rules) or "")


@pytest.mark.parametrize("autocast", [False, True])
def test_short_segments_in_bfloat16_go_backward_in_float32(autocast):
    plan = AttentionPlan.build(RaggedBatch.from_segments([[1] * n for n in (5, 11, 11, 30)]))
    generator = torch.Generator().manual_seed(0)
    narrow = [torch.randn(57, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2)]
    slopes = torch.randn(57, 4, 16, generator=generator).bfloat16()

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in narrow]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.bfloat16):
            out = varlen_attention(*leaves, plan, backend="grouped")
        out.backward(slopes.to(dtype))
        return [out, *(each.grad for each in leaves)]

    for found, wanted in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), wanted, rtol=1.6e-2, atol=1e-2)
