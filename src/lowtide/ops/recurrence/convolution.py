"""Short causal convolutions over segments: each tap reads the token so many places back in the segment or its prefix.

Where there is none, a tap reads zero. Only the first tokens of a segment read elsewhere than in the tokens right before
them, so the taps are shifts of the whole sequence in which a few rows are replaced. The shifts are made anew in
backward, so that nothing is kept but the input.

On a GPU the kernel of causal-conv1d (github.com/Dao-AILab/causal-conv1d) computes it where it is installed. It knows
which sequence a token is of; the last inputs of a prefix are copied before each segment that goes on from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.attention.attention_plan import AttentionPlan, Gather, Places, gathered, scattered
from lowtide.ops.installed_kernels import Kernel, serving, values_and_gradients
from lowtide.ragged import RaggedBatch, sent

KERNEL = Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn")


class _Back(NamedTuple):
    """Which tokens do not find what they read so many places back right before them."""

    distance: int
    nothing: Int[Tensor, " first"]
    """Tokens that read zero."""
    moved: Int[Tensor, " others"]
    """Tokens that read another token."""
    source: Int[Tensor, " others"]
    """What those read."""


def causal_convolution(
    x: Float[Tensor, "keys channels"], weight: Float[Tensor, "channels taps"], plan: AttentionPlan
) -> Float[Tensor, "tokens channels"]:
    """Depthwise convolution of each segment with what stands before it in its prefix.

    Args:
        x: of the tokens of the plan, and of those that earlier pieces of the row carry (`AttentionPlan.behind`).
        weight: the last tap is the token's own.

    Returns:
        In the wider type of both, or by a kernel in that of `x`; sums of 16-bit numbers are rounded once.
    """
    channels, taps = weight.shape
    kernel = None
    if 2 <= taps <= 4 and channels % 8 == 0:
        kernel = serving(KERNEL, x, x.dtype, (channels, taps), functools.partial(_beside_the_operation, x, weight))
    return _plainly(x, weight, plan) if kernel is None else _by_kernel(kernel, x, weight, plan)


def _plainly(x: Tensor, weight: Tensor, plan: AttentionPlan) -> Tensor:
    taps = weight.shape[1]
    backs = plan.once(("taps", taps), lambda: tuple(_back(plan, distance) for distance in range(1, taps)))
    return _Convolution.apply(x, weight, backs, plan.tokens)


class _Sequences(NamedTuple):
    """Segments end to end, each behind the last inputs of its prefix."""

    numbers: Int32[Tensor, "1 places"]
    """Of each place the segment."""
    gather: Gather | None


def _sequences(plan: AttentionPlan, reach: int) -> _Sequences:
    places, lengths = Places(), []
    for part in plan.segments:
        before = plan.before(part)
        if before is not None:
            before = before._replace(start=max(before.start, before.stop - reach))
            (places.put_or_share if plan.carried else places.share)(before)
        places.put(part, part.length)
        lengths.append(part.length + (before.length if before is not None else 0))
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return _Sequences(sent(numbers[None], plan.device), places.gather(plan, plan.key_tokens))


def _by_kernel(kernel: Callable[..., Any], x: Tensor, weight: Tensor, plan: AttentionPlan) -> Tensor:
    """Channels lie side by side, which the kernel asks for where it is told of sequences."""
    taps = weight.shape[1]
    sequences = plan.once(("sequences", taps), lambda: _sequences(plan, taps - 1))
    laid = gathered(x.contiguous(), sequences.gather)
    out = kernel(laid.T[None], weight.contiguous(), seq_idx=sequences.numbers)
    return scattered(out[0].T, sequences.gather)[: plan.tokens]


def _beside_the_operation(x: Tensor, weight: Tensor, kernel: Callable[..., Any]) -> list[tuple[Tensor, Tensor]]:
    """What a kernel and the operation here compute of random inputs like these."""
    draws = torch.Generator().manual_seed(0)
    rows = RaggedBatch.from_segments([[1] * n for n in (70, 40, 2, 130)], prefix=[-1, (0, 33), 0, -1], row=[0, 0, 0, 1])
    plan = AttentionPlan.build(rows.to(x.device))
    shapes = ((plan.tokens, len(weight)), weight.shape)
    given = [torch.randn(shape, generator=draws).to(like) for shape, like in zip(shapes, (x, weight), strict=True)]
    found = values_and_gradients(lambda x, weight: [_by_kernel(kernel, x, weight, plan)], given)
    return [*zip(found, values_and_gradients(lambda x, weight: [_plainly(x, weight, plan)], given), strict=True)]


def _back(plan: AttentionPlan, distance: int) -> _Back:
    nothing, moved, source = [], [], []
    for part in plan.segments:
        before = plan.before(part)
        for token in range(part.start, min(part.start + distance, part.stop)):
            beyond = distance - (token - part.start)
            if before is not None and beyond <= before.length:
                moved.append(token)
                source.append(before.stop - beyond)
            else:
                nothing.append(token)
    sides = (sent(torch.tensor(each, dtype=torch.long), plan.device) for each in (nothing, moved, source))
    return _Back(distance, *sides)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backs: tuple[_Back, ...], tokens: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.backs, ctx.tokens = backs, tokens
        wide = torch.promote_types(x.dtype, torch.float32)
        by_distance = weight.to(wide).flip(1).unbind(1)
        out = x[:tokens] * by_distance[0]
        for back in backs:
            out.addcmul_(_shifted(x, back, tokens).to(wide), by_distance[back.distance])
        return out.to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        grad, by_distance = grad.to(wide), weight.to(wide).flip(1).unbind(1)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = grad.new_zeros(x.shape)
            of_x[: ctx.tokens] = grad * by_distance[0]
            for back in ctx.backs:
                _add_back(of_x, grad * by_distance[back.distance], back)
            of_x = of_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            sums = [(grad * x[: ctx.tokens]).sum(0)]
            sums += [(grad * _shifted(x, back, ctx.tokens)).sum(0) for back in ctx.backs]
            of_weight = torch.stack(sums[::-1], 1).to(weight.dtype)
        return of_x, of_weight, None, None


def _shifted(x: Tensor, back: _Back, tokens: int) -> Tensor:
    """What each token reads so many places back."""
    out = x.new_zeros(tokens, *x.shape[1:])
    out[back.distance :] = x[: max(tokens - back.distance, 0)]
    out.index_fill_(0, back.nothing, 0)
    return out.index_copy_(0, back.moved, x.index_select(0, back.source))


def _add_back(total: Tensor, grad: Tensor, back: _Back) -> None:
    """Adds the gradients of what `_shifted` reads to those of where it reads it; writes to both."""
    total.index_add_(0, back.source, grad.index_select(0, back.moved))
    grad.index_fill_(0, back.nothing, 0).index_fill_(0, back.moved, 0)
    tokens = grad.shape[0]
    total[: max(tokens - back.distance, 0)] += grad[back.distance :]
