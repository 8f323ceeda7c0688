"""A token embedding that adds its gradient in place, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.ops.embedding import embed_tokens
from lowtide.ops.logits.linear_logprobs import Term, TokenStats, linear_logprobs, linear_loss

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


class Made(TorchDispatchMode):
    """Counts the tensors of a shape that are made of zeros."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape and "new_zeros" in str(func):
            self.count += 1
        return out


def nll(stats: TokenStats) -> torch.Tensor:
    return -stats.logprobs


def tied_loss(weight: torch.nn.Parameter, *, heads: int, of_loss: bool) -> torch.Tensor:
    """Of an embedding that is looked up twice, and of one head or two with the same weight."""
    x = embed_tokens(IDS, weight, 0) + embed_tokens(IDS.flip(0), weight)
    target, index = torch.tensor([1, 2, 3, 4, 5]), torch.arange(5)
    total = torch.zeros(())
    for scale in range(1, heads + 1):
        if of_loss:
            total = total + scale * linear_loss([Term(x, weight)], index, target, nll)[0]
        else:
            total = total - scale * linear_logprobs([Term(x, weight)], index, target).logprobs.sum()
    return total


def plain_gradient(heads: int) -> torch.Tensor:
    weight = made()
    x = F.embedding(IDS, weight, 0) + F.embedding(IDS.flip(0), weight)
    loss = F.cross_entropy(x @ weight.t(), torch.tensor([1, 2, 3, 4, 5]), reduction="sum")
    (sum(range(1, heads + 1)) * loss).backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("of_loss", [True, False])
def test_a_tied_embedding_of_a_weight_with_hooks_adds_its_rows_to_the_heads_gradient(kind, heads, of_loss):
    weight, seen = made(), []
    getattr(weight, kind)(lambda found: seen.append((found if kind == "register_hook" else found.grad).clone()))
    loss = tied_loss(weight, heads=heads, of_loss=of_loss)
    with Made(weight.shape) as dense:
        loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, plain_gradient(heads))
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)
    assert dense.count == (2 if kind == "register_hook" else 0)  # a hook before would see it without the rows


def test_rows_of_a_backward_that_failed_are_not_added_to_the_next():
    weight = made()
    weight.register_post_accumulate_grad_hook(lambda _: None)
    first_made = weight.clone()  # so its backward comes last, when the rows wait
    first_made.register_hook(lambda _: 1 / 0)
    first = tied_loss(weight, heads=1, of_loss=True) + first_made.sum()
    with pytest.raises(ZeroDivisionError):
        first.backward()
    weight.grad = None
    tied_loss(weight, heads=1, of_loss=True).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, plain_gradient(1))
