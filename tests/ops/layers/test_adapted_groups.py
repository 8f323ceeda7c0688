"""Grouped products with low-rank adapters against one product a group, in float64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, library

from lowtide.ops.layers.adapted_groups import BACKWARD, FORWARD, adapted_groups

ENDS = torch.tensor([3, 3, 7, 12], dtype=torch.int32)
"""The second group has no rows."""


def given(transposed: bool) -> list[Tensor]:
    """`x`, the stack, and the factors of its adapter; as views of transposed ones, as experts have them."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((12, 5), (4, 5, 6), (4, 5, 2), (4, 2, 6))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if transposed:
        made[1:] = [each.mT.contiguous().mT for each in made[1:]]
    return [each.requires_grad_(number != 1) for number, each in enumerate(made)]


def plain(x: Tensor, stack: Tensor, first: Tensor, second: Tensor) -> Tensor:
    spans = itertools.pairwise([0, *ENDS.tolist()])
    return torch.cat([x[a:b] @ (stack[n] + first[n] @ second[n]) for n, (a, b) in enumerate(spans)])


def test_values_and_gradients_are_those_of_one_product_a_group():
    for transposed in (False, True):
        ours, theirs = given(transposed), given(transposed)
        out, wanted = adapted_groups(*ours, ENDS), plain(*theirs)
        torch.testing.assert_close(out, wanted)
        slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * slope).sum().backward()
        (wanted * slope).sum().backward()
        for number in (0, 2, 3):
            torch.testing.assert_close(ours[number].grad, theirs[number].grad)


def test_it_is_traced_without_values():
    x, stack, first, second = (each.detach() for each in given(False))
    out, low = FORWARD(x, stack, first, second, ENDS)
    weights = (stack, first, second, ENDS)
    for operation, arguments in ((FORWARD, (x, *weights)), (BACKWARD, (out, x, low, *weights))):
        library.opcheck(operation.default, arguments, test_utils=("test_schema", "test_faketensor"))
