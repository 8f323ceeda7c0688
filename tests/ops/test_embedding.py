"""A token embedding that adds its gradient in place, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowtide.ops.embedding import embed_tokens

IDS = torch.tensor([3, 1, 3, 0, 2])


def gradient_of(embed, weight: torch.Tensor) -> torch.Tensor:
    slopes = torch.arange(20.0).view(5, 4)
    (embed(IDS, weight, 0) * slopes).sum().backward()
    assert weight.grad is not None
    return weight.grad


def made() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))


def test_the_gradient_is_that_of_torch():
    assert torch.equal(gradient_of(embed_tokens, made()), gradient_of(F.embedding, made()))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_the_weight_are_called_once_with_its_gradient(kind):
    weight, seen = made(), []
    getattr(weight, kind)(lambda found: seen.append((found if kind == "register_hook" else found.grad).clone()))
    gradient = gradient_of(embed_tokens, weight)
    assert len(seen) == 1
    assert torch.equal(seen[0], gradient)
