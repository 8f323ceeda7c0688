"""Short convolutions over segments against torch's own on each row alone: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.recurrence.convolution import causal_convolution
from lowtide.ragged import RaggedBatch

LENGTHS = [5, 1, 7, 3, 1, 6]
CASES = {
    "apart": ([-1] * 6, list(range(6))),
    "shared": ([-1, -1, -1, 2, 2, (2, 2)], [0, 1, 2, 2, 2, 2]),
    "short": ([-1, -1, -1, -1, 3, (3, 1)], [0, 1, 2, 3, 3, 3]),
}


def plan_of(case: str) -> AttentionPlan:
    prefix, row = CASES[case]
    tokens = [list(range(length)) for length in LENGTHS]
    return AttentionPlan.build(RaggedBatch.from_segments(tokens, prefix=prefix, row=row))


def row_by_row(x: Tensor, weight: Tensor, plan: AttentionPlan) -> Tensor:
    outs = []
    for part in plan.segments:
        before = part.prefix_among(plan.segments)
        row = x[part.start : part.stop]
        if before is not None:
            row = torch.cat([x[before.start : before.stop], row])
        padded = torch.nn.functional.pad(row.T, (weight.shape[1] - 1, 0))
        outs.append(torch.nn.functional.conv1d(padded, weight[:, None], groups=len(weight)).T[-part.length :])
    return torch.cat(outs)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_each_row_alone(case: str, taps: int):
    plan, generator = plan_of(case), torch.Generator().manual_seed(0)
    x = torch.randn(plan.tokens, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, taps, generator=generator, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(plan.tokens, 3, generator=generator, dtype=torch.float64)

    got, wanted = causal_convolution(x, weight, plan), row_by_row(x, weight, plan)

    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
    for each, right in zip(
        torch.autograd.grad((got * factors).sum(), (x, weight)),
        torch.autograd.grad((wanted * factors).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(each, right, atol=1e-12, rtol=0)


def test_sums_of_16_bits_are_rounded_once():
    plan, generator = plan_of("shared"), torch.Generator().manual_seed(0)
    x, weight = torch.randn(plan.tokens, 3, generator=generator).bfloat16(), torch.randn(3, 4, generator=generator)
    wanted = causal_convolution(x.float(), weight.bfloat16().float(), plan).bfloat16()
    assert torch.equal(causal_convolution(x, weight.bfloat16(), plan), wanted)
