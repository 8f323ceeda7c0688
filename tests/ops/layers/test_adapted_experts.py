"""Tokens times the adapted matrices of their experts against one product a pair, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, library

from lowtide.ops.layers.adapted_experts import (
    BACKWARD,
    FORWARD,
    AdaptedStack,
    Pairs,
    summed_over_experts,
    taken_by_experts,
)

PAIRS = Pairs(torch.tensor([0, 3, 4, 1, 2, 0, 4, 1, 3, 2]), torch.tensor([3, 3, 6, 10]))
"""Two experts of each of five tokens; the second sees none."""
OF_PAIRS = (0, 0, 0, 2, 2, 2, 3, 3, 3, 3)


def given(transposed: bool, rows: int, rank: int = 2) -> list[Tensor]:
    """Rows, the matrices, and the factors of their adapters; as views of transposed ones, as experts have them."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 5), (4, 5, 6), (4, 5, rank), (4, rank, 6))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if transposed:
        made[1:] = [each.mT.contiguous().mT for each in made[1:]]
    return [each.requires_grad_(number != 1) for number, each in enumerate(made)]


def plain(rows: Tensor, stack: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """What the expert of each pair makes of its row."""
    whole = stack + first @ second
    return torch.stack([row @ whole[expert] for row, expert in zip(rows, OF_PAIRS, strict=True)])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients_are_those_of_one_product_a_pair(transposed: bool, rank: int):
    tokens = PAIRS.tokens
    for summed in (False, True):
        ours, theirs = (given(transposed, 10 if summed else 5, rank) for _ in range(2))
        stack = AdaptedStack(*ours[1:])
        if summed:
            out = summed_over_experts(ours[0], stack, PAIRS, 5)
            wanted = torch.zeros_like(out).index_add(0, tokens, plain(*theirs))
        else:
            out, wanted = taken_by_experts(ours[0], stack, PAIRS), plain(theirs[0][tokens], *theirs[1:])
        torch.testing.assert_close(out, wanted)
        slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * slope).sum().backward()
        (wanted * slope).sum().backward()
        for number in (0, 2, 3):
            torch.testing.assert_close(ours[number].grad, theirs[number].grad)


@pytest.mark.parametrize("count", [None, 5])
def test_it_is_traced_without_values(count: int | None):
    x, *stack = (each.detach() for each in given(False, 10 if count else 5))
    out, low = FORWARD(x, stack, PAIRS, count)
    for operation, arguments in (
        (FORWARD, (x, stack, PAIRS, count)),
        (BACKWARD, (out, x, low, stack, PAIRS, count is not None)),
    ):
        library.opcheck(operation.default, arguments, test_utils=("test_schema", "test_faketensor"))
