"""Rows of logits: reduced to a few statistics each, then overwritten with the gradient at the raw logits.

The two passes that `linear_logprobs` makes over a chunk of logits while it is there. `TorchRows` is plain torch, for
any device and float dtype, and the reference; `TritonRows` does the same on CUDA without a float32 copy of the rows
and without a pass for each operation. `ops.logits.rows_of` chooses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Projection(NamedTuple):
    """What happens to the sum of the terms before it is a logit."""

    scale: float = 1.0
    """Factor of the logits (`logit_scale` of Cohere, 1 / `logits_scaling` of Granite)."""
    softcap: float | None = None
    """`softcap * tanh(logits / softcap)` (`final_logit_softcapping` of Gemma)."""
    temperature: float = 1.0
    """Divisor of the logits, applied last."""


class Want(NamedTuple):
    """Which statistics to compute beyond the log-probabilities."""

    entropies: bool = False
    mean_logprobs: bool = False
    top1: bool = False
    collisions: bool = False
    divergences: bool = False


class Support(NamedTuple):
    """The tokens that two distributions are compared on."""

    tokens: int
    """So many: the student's likeliest."""
    tail: bool = False
    """All others count as one more token. False leaves them out, and has what is left add up to 1."""
    named: bool = False
    """They are those that the teacher names, with its log-probabilities, which is all that is known of it."""
    of_teacher: bool = False
    """They are the teacher's likeliest in place of the student's."""


class Named(NamedTuple):
    """The tokens that a teacher names at some scores, each row with as many of them, and their log-probabilities."""

    tokens: Int[Tensor, "scores named"]
    logprobs: Float[Tensor, "scores named"]
    """-inf fills a row up that has fewer."""


class RowStats(NamedTuple):
    """Statistics of some rows, [rows] each, at least in float32; unwanted ones are empty."""

    logprobs: Tensor
    entropies: Tensor
    mean_logprobs: Tensor
    top1: Tensor
    lse: Tensor
    """Log-sum-exp of the logits, from which the rows can be restored."""
    collisions: Tensor
    """Log of the sum of squared probabilities."""
    divergences: Tensor
    """From a teacher's distribution (see `ops.logits.compared_rows`)."""
    span_slopes: Tensor
    """Between two vocabularies, the gradients of these at the log-probabilities of the other tokens of each span."""


class Slopes(NamedTuple):
    """Gradients at the statistics of some rows, [rows] each; None where a statistic takes no part."""

    logprobs: Tensor
    entropies: Tensor | None = None
    mean_logprobs: Tensor | None = None
    divergences: Tensor | None = None


class TorchRows:
    """Some rows of logits, changed in place from raw logits to exponentials to the gradient."""

    def __init__(
        self,
        logits: Tensor,
        target: Tensor,
        projection: Projection,
        scratch: Tensor | None = None,
        vocab: int | None = None,
    ):
        """`logits` [rows, vocab] is used up; `target` [rows]; `scratch` [2, rows or more, vocab] spares allocations.

        Where the columns are a part of a vocabulary, `vocab` is the size of that, and a target among the others is -1.
        """
        self.place, self.scratch = logits, scratch
        self.x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        self.target, self.projection = target[:, None], projection
        self.vocab = vocab or logits.shape[-1]
        self.elsewhere = None if vocab is None else target < 0
        if vocab is not None:
            self.target = self.target.clamp(min=0)
        if projection.scale != 1.0:
            self.x.mul_(projection.scale)
        if projection.softcap is not None:
            self.x.div_(projection.softcap).tanh_().mul_(projection.softcap)
        if projection.temperature != 1.0:
            self.x.div_(projection.temperature)

    def stats(self, want: Want, keep: bool) -> RowStats:
        """The statistics; `keep` if entropies take part in a gradient that follows at once."""
        top = self.x.amax(-1, keepdim=True)
        chosen = self.x.gather(-1, self.target)
        empty = self.x.new_empty(0)
        mean = self.x.mean(-1, keepdim=True) if want.mean_logprobs else None
        self._exponentiate(top, keep or want.entropies)
        total = self.x.sum(-1, keepdim=True)
        log_total = total.log()
        lse = top + log_total
        entropy = empty
        if want.entropies:
            assert self.shifted is not None
            products = torch.mul(self.x, self.shifted, out=self._scratch())
            entropy = (log_total - products.sum(-1, keepdim=True) / total).squeeze(-1)
        self.top, self.total, self.log_total = top, total, log_total
        return RowStats(
            (chosen - lse).squeeze(-1),
            entropy,
            empty if mean is None else (mean - lse).squeeze(-1),
            (chosen >= top).squeeze(-1) if want.top1 else empty.bool(),
            lse.squeeze(-1),
            (self._square_sum().log() - 2 * log_total).squeeze(-1) if want.collisions else empty,
            empty,
            empty,
        )

    def ends(self) -> tuple[Tensor, Tensor]:
        """The logit of the target, any where that is elsewhere, and the largest of each row, before `stats`."""
        return self.x.gather(-1, self.target).squeeze(-1), self.x.amax(-1)

    def settle(self, lse: Tensor) -> None:
        """After `stats`: the log-sum-exp [rows] is another, since there are further columns elsewhere."""
        self.log_total = lse[:, None] - self.top
        self.total = self.log_total.exp()

    def _square_sum(self) -> Tensor:
        return torch.mul(self.x, self.x, out=self._scratch()).sum(-1, keepdim=True)

    def _scratch(self) -> Tensor | None:
        """Where a product of two blocks goes."""
        return None if self.scratch is None else self.scratch[1, : len(self.x)]

    def restore(self, lse: Tensor, keep: bool) -> None:
        """The state after `stats`, from a log-sum-exp [rows] that is known already."""
        self._exponentiate(lse[:, None], keep)
        self.top, self.total, self.log_total = lse[:, None], 1.0, 0.0

    def _exponentiate(self, top: Tensor, keep: bool) -> None:
        self.x.sub_(top)
        self.shifted = self._copy() if keep or self.projection.softcap is not None else None
        self.x.exp_()

    def _copy(self) -> Tensor:
        # Blocks of this size, each made anew among the small results, leave a heap full of holes.
        return self.x.clone() if self.scratch is None else self.scratch[0, : len(self.x)].copy_(self.x)

    def gradient(self, slopes: Slopes, entropies: Tensor) -> None:
        """Overwrites the logits with the gradient at the raw ones; `entropies` are those that `stats` gave."""
        capped = None
        if self.projection.softcap is not None:
            # d tanh: 1 - (capped / softcap)^2, of the capped logits before the temperature
            assert self.shifted is not None
            capped = (self.shifted + self.top) * (self.projection.temperature / self.projection.softcap)
        self.slope(slopes, entropies)
        if capped is not None:
            self.x.mul_(capped.square_().neg_().add_(1))
        factor = self.projection.scale / self.projection.temperature
        if factor != 1.0:
            self.x.mul_(factor)
        if self.x is not self.place:
            self.place.copy_(self.x)

    def slope(self, slopes: Slopes, entropies: Tensor) -> None:
        """Overwrites the exponentials with the gradient at the logits after their projection."""
        logprob, entropy, mean, _ = slopes
        of_sum = logprob if mean is None else logprob + mean
        if entropy is None:
            self.x.mul_(-of_sum[:, None] / self.total)
        else:
            # dH/dx_j = -p_j (log p_j + H)
            assert self.shifted is not None
            slope = self.shifted.sub_(self.log_total).add_(entropies[:, None]).mul_(entropy[:, None])
            self.x.mul_(slope.add_(of_sum[:, None]).neg_().div_(self.total))
        if mean is not None:
            self.x.add_(mean[:, None] / self.vocab)
        at_target = logprob if self.elsewhere is None else logprob.masked_fill(self.elsewhere, 0)
        self.x.scatter_add_(-1, self.target, at_target[:, None])
