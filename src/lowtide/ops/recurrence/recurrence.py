"""What a recurrence is to the plans that compute it: given tokens that are computed from given states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.ops.attention.attention_plan import AttentionPlan

Laying = Callable[[Tensor], Tensor]


class Recurrence(Protocol):
    """A recurrence of given tokens, which a plan computes from the states that it holds."""

    @property
    def like(self) -> Tensor:
        """One of what is given, which has a gradient where the state has one."""
        ...

    def over(
        self, plan: AttentionPlan, chunk: int, initial: Tensor | None = None, *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """What each token reads off its state, and the states after the segments if `final`.

        Args:
            plan: of the segments.
            chunk: tokens of a chunk.
            initial: [segments, ...], the states that segments without a prefix start from; zero if None.
        """
        ...

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same of one token of each row, [rows, ...], from the states of the rows, and the states after it."""
        ...

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads have a state of their own, and how many keys these share in equal groups."""
        ...

    def mapped(self, heads: Laying, keys: Laying, weights: Laying) -> Recurrence:
        """The recurrence of other heads.

        Args:
            heads: makes [tokens', heads', ...] of [tokens, heads, ...].
            keys: the same of what heads share.
            weights: makes [heads', ...] of what all tokens have alike, [heads, ...].
        """
        ...


RECOMPUTED = "recomputes_recurrences"
"""The attribute of a layer with recurrences that says whether it computes them again in backward."""


@dataclass(frozen=True)
class ComputedAgain:
    """A recurrence that keeps nothing for backward but its inputs, and is computed again there."""

    inner: Recurrence

    @property
    def like(self) -> Tensor:
        return self.inner.like

    def over(
        self, plan: AttentionPlan, chunk: int, initial: Tensor | None = None, *, final: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        names, kind = [*vars(self.inner)], type(self.inner)

        def compute(initial: Tensor | None, *given: Any) -> tuple[Tensor, Tensor | None]:
            return kind(**dict(zip(names, given, strict=True))).over(plan, chunk, initial, final=final)

        given = (initial, *vars(self.inner).values())  # as arguments, so that what offloads activations sees them
        return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False, determinism_check="none")

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.step(state)

    @property
    def heads(self) -> tuple[int, int]:
        return self.inner.heads

    def mapped(self, heads: Laying, keys: Laying, weights: Laying) -> ComputedAgain:
        return ComputedAgain(self.inner.mapped(heads, keys, weights))
