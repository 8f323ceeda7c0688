"""Attention to values that are narrower than keys, by the kernels that want one width."""

import pytest
import torch

from lowtide.compat.torch import TorchDispatchMode
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules
from lowtide.ops.attention.value_width import of_one_width
from lowtide.ops.attention.varlen_attention import BACKENDS, varlen_attention
from lowtide.ops.target import planning_for
from tests.support.references.dense_attention import LENGTHS, VARIANTS, dense, ragged

WIDTH, OWN = 8, 5


def tensors(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, heads, width, dtype=dtype) for heads, width in ((4, WIDTH), (2, WIDTH), (2, OWN))]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", ["unequal", "prefix", "tree"])
def test_values_and_gradients_are_those_of_dense_attention(shape, variant):
    batch = ragged(*LENGTHS[shape])
    ours, theirs = ([t.clone().requires_grad_() for t in tensors(batch.tokens)] for _ in range(2))
    out = varlen_attention(*ours, AttentionPlan.build(batch), **VARIANTS[variant])
    expected = dense(*theirs, batch, **VARIANTS[variant])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-8, atol=1e-8)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation gives."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(each, torch.Tensor):
                self.entries = max(self.entries, each.numel())
        return found


def test_no_scores_are_written_out():
    batch = ragged([600], [-1])
    leaves = [each.requires_grad_() for each in tensors(600, torch.float32)]
    with Largest() as seen:
        varlen_attention(*leaves, AttentionPlan.build(batch)).sum().backward()
    assert seen.entries <= 4 * 600 * WIDTH


def test_flash_kernels_serve_it():
    query, key, value = (
        torch.zeros(12, heads, dim, dtype=torch.bfloat16) for heads, dim in ((4, 192), (4, 192), (4, 128))
    )
    with planning_for("cuda", (9, 0)):
        assert BACKENDS["varlen"].why_not(query, key, value, Rules(1.0)) is None
        assert "values no wider" in (BACKENDS["varlen"].why_not(value, value, key, Rules(1.0)) or "")


def test_a_kernel_gets_one_width_and_gives_what_values_have():
    query, key, value = tensors(6)

    def kernel(q, k, v, factor):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return factor * v

    assert torch.equal(of_one_width(kernel)(query, key, value, 2.0), 2.0 * value)
