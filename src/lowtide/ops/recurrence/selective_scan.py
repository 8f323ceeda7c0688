"""The selective scan of Mamba (arXiv 2312.00752) over segments of unequal length, some of which go on from a part of
another.

The state is a matrix [channels, width] that starts at zero, and each token t updates and reads it:

    S_t = exp(dt_t A) S_(t-1) + (dt_t x_t) B_t^T,    y_t = S_t C_t

Here each number of the state has a decay of its own, so that no matrix product relates the tokens of a chunk to each
other. They are taken one after the other, those of all segments at once, in the order of `layout`. What is kept
for backward are the inputs and the states between chunks; the states of a chunk's tokens, `width` times the inputs, are
made again from these.

Everything is computed at least in float32, outside of autocast: a state is a sum over all tokens before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.attention.attention_plan import AttentionPlan, scattered
from lowtide.ops.recurrence.layout import RecurrenceLayout, scan
from lowtide.ops.recurrence.recurrence import Laying
from lowtide.ops.target import without_autocast

CHUNK_OF_SCAN = 16
"""Tokens of a chunk: the states between chunks are as large as one of the inputs where `width` is 16, as in Mamba."""


@dataclass(frozen=True)
class SelectiveScan:
    """A selective scan of given tokens."""

    x: Float[Tensor, "tokens channels"]
    dt: Float[Tensor, "tokens channels"]
    """Time steps, not negative."""
    A: Float[Tensor, "channels width"]
    """Rates, at most 0."""
    B: Float[Tensor, "tokens width"]
    C: Float[Tensor, "tokens width"]

    @property
    def like(self) -> Tensor:
        return self.x

    def over(
        self,
        plan: AttentionPlan,
        chunk: int,
        initial: Float[Tensor, "segments channels width"] | None = None,
        *,
        final: bool = False,
    ) -> tuple[Float[Tensor, "tokens channels"], Float[Tensor, "segments channels width"] | None]:
        """What each token reads off its state, and the states after the segments if `final`.

        Args:
            plan: of the segments.
            chunk: tokens of a chunk.
            initial: the states that segments without a prefix start from; zero if None.
        """
        dtype, layout = torch.promote_types(self.x.dtype, torch.float32), RecurrenceLayout.of(plan, chunk)
        with without_autocast(self.x.device):
            x, B, C = (layout.lay(each.to(dtype)) for each in (self.x, self.B, self.C))
            dt = layout.lay(self.dt.to(dtype), masked=True)  # a step of zero neither writes nor forgets
            parts = list(zip(*(each.split(layout.counts) for each in (x, dt, B, C)), strict=True))
            rate, start = self.A.to(dtype), None if initial is None else initial.to(dtype)

            def step(number: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
                x, dt, B, C = parts[number]
                return _Chunks.apply(x, dt, rate, B, C, state)

            outs, finals = scan(step, layout, start, final)
            return scattered(torch.cat(outs).flatten(0, 1), layout.gather), finals

    def step(self, state: Float[Tensor, "rows channels width"]) -> tuple[Tensor, Tensor]:
        """The same of one token of each row, and the states after it, in the type of the states."""
        with without_autocast(self.x.device):
            x, dt, A, B, C = (each.to(state.dtype) for each in (self.x, self.dt, self.A, self.B, self.C))
            state = state * (dt[..., None] * A).exp() + (dt * x)[..., None] * B[:, None]
            return (state @ C[..., None])[..., 0], state

    @property
    def heads(self) -> tuple[int, int]:
        """Each channel has a state of its own, and all share `B` and `C`."""
        return self.x.shape[1], 1

    def mapped(self, heads: Laying, keys: Laying, weights: Laying) -> SelectiveScan:
        """The scan of other channels; see `recurrence.Recurrence`. All keys that come of it are the same."""
        B, C = (keys(each[:, None])[:, 0] for each in (self.B, self.C))
        return SelectiveScan(heads(self.x), heads(self.dt), weights(self.A), B, C)


class _Chunks(torch.autograd.Function):
    """The scan over chunks that stand side by side: [chunks, chunk, ...], from states [chunks, channels, width]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, dt, A, B, C, state)
        states, _ = _states(x, dt, A, B, state)
        return (states @ C[..., None])[..., 0], states[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_out, of_last = grads
        x, dt, A, B, C, state = ctx.saved_tensors
        states, decay = _states(x, dt, A, B, state)
        of_C = (of_out[..., None, :] @ states)[..., 0, :]
        later = of_out[..., None] * C[..., None, :]  # becomes the gradient of each token's state
        later[:, -1] += of_last
        for t in range(x.shape[1] - 1, 0, -1):
            later[:, t - 1].addcmul_(decay[:, t], later[:, t])
        of_state = None if state is None else decay[:, 0] * later[:, 0]
        of_added = (later @ B[..., None])[..., 0]
        of_B = ((dt * x)[..., None, :] @ later)[..., 0, :]
        decay[:, 1:] *= states[:, :-1]
        decay[:, 0] *= 0.0 if state is None else state
        of_exponent = decay.mul_(later)
        of_dt = (of_exponent * A).sum(-1) + of_added * x
        of_A = (of_exponent * dt[..., None]).sum((0, 1))
        return of_added * dt, of_dt, of_A, of_B, of_C, of_state


def _states(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states after each token, [chunks, chunk, channels, width], and the factors that they were faded by."""
    decay = (dt[..., None] * A).exp_()
    states = (dt * x)[..., None] * B[..., None, :]
    if state is not None:
        states[:, 0].addcmul_(decay[:, 0], state)
    for t in range(1, x.shape[1]):
        states[:, t].addcmul_(decay[:, t], states[:, t - 1])
    return states, decay
