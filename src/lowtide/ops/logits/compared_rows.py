"""Rows of a student's logits beside a teacher's: how far the two distributions are apart, and the gradient of that.

The distance is the generalized Jensen-Shannon divergence (Agarwal et al., arXiv 2306.13649, equation 1). With the
teacher's distribution p, the student's q, and their mixture m = beta p + (1 - beta) q it is

    beta KL(p || m) + (1 - beta) KL(q || m)    for 0 < beta < 1
    KL(p || q)                                 for beta = 0
    KL(q || p)                                 for beta = 1

Its gradient at the student's logits, over the temperature, is q - p for beta = 0, and otherwise q (g - sum of q g) with
g = log q - log p for beta = 1 and g = (1 - beta) (log q - log m) between. As in TRL no power of the temperature is
taken out.

On a support, p and q are those of some tokens alone, made to add up to 1 or with one more token for all others: of the
likeliest ones of either, or of those that a teacher names of which no more is known. Distributions over two
vocabularies have a distance of their own (`ops.logits.across_vocabularies`). Of both autograd takes the gradient, a
block of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.ops.logits.across_vocabularies import Across, divergence
from lowtide.ops.logits.logit_rows import Named, Projection, RowStats, Slopes, Support, TorchRows, Want

LEAST_LEFT = -1e-7
"""The log of the most that a support may hold, so that there is something left beyond it; TRL's."""
NOTHING = -1e4
"""The log of a probability that is 0 in any dtype, and which has a gradient that is 0."""


class Comparison(NamedTuple):
    """How a teacher's logits are compared with."""

    projection: Projection
    """What they go through before."""
    beta: float
    """From 0 to 1."""
    support: Support | None = None
    """The tokens that are compared; None for all."""
    across: Across | None = None
    """The two vocabularies have other tokens, and this is how they are compared."""
    merged: tuple[Tensor, Tensor] | None = None
    """[rows] each, then: the log-probabilities of the other tokens of each row's span, the student's and the
    teacher's."""


class ComparedRows(TorchRows):
    """Some rows of a student's logits, which also know the teacher's of the same scores.

    Where one vocabulary has more rows than the other, as of rows that pad it, both distributions are over those that
    both have. The divergence's slope is formed with the statistics, in place of the teacher's logits. Where the columns
    are a part of a vocabulary, `stats` is without divergences: `compare` gives them, after `settle`.
    """

    def __init__(
        self,
        logits: Tensor,
        target: Tensor,
        projection: Projection,
        scratch: Tensor | None,
        *,
        teacher: Tensor,
        how: Comparison,
        vocab: int | None = None,
    ):
        """As of `TorchRows`; `teacher` [rows, its vocab] is used up likewise."""
        assert vocab is None or (how.support is None and how.across is None), "these go with whole vocabularies"
        ours, theirs = logits.shape[1], teacher.shape[1]
        if how.across is None:
            ours = theirs = min(ours, theirs)
        self.beyond, self.how = logits[:, ours:], how
        scratch = None if scratch is None else scratch[..., :ours]
        super().__init__(logits[:, :ours], target, projection, scratch, vocab)
        self.theirs = TorchRows(teacher[:, :theirs], target, how.projection).x.to(self.x.dtype)
        self.span_slopes = self.x.new_empty(0)

    def stats(self, want: Want, keep: bool) -> RowStats:
        found = super().stats(want, keep=True)
        if self.elsewhere is not None:
            return found
        divergences = self.compare(self.their_lse(), lambda of_all: of_all)
        return found._replace(divergences=divergences, span_slopes=self.span_slopes)

    def their_lse(self) -> Tensor:
        """[rows]: the log-sum-exp of the teacher's logits that lie here."""
        return self.theirs.logsumexp(-1)

    def compare(self, their_lse: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        """[rows]: the divergences, of which the slope is kept.

        Args:
            their_lse: [rows], of all the teacher's logits.
            summed: makes sums over all columns of those over the columns that lie here.
        """
        assert self.shifted is not None
        q, log_q = self.x.div_(self.total), self.shifted.sub_(self.log_total)
        self.top, self.total, self.log_total = self.top + self.log_total, 1.0, 0.0
        log_p = self.theirs.sub_(their_lse[:, None])
        if self.how.across is not None:
            return self._compare_across(self.how.across, q, log_q, log_p)
        if self.how.support is not None:
            return self._compare_on(self.how.support, q, log_q, log_p)
        beta = self.how.beta
        if beta == 0:
            difference = torch.sub(log_p, log_q, out=self._scratch())
            p = log_p.exp_()
            divergences = difference.mul_(p).sum(-1)
            p.neg_().add_(q)
            return summed(divergences)
        if beta == 1:
            slope = log_p.neg_().add_(log_q)
            divergences = summed(_expected(slope, q))
            slope.sub_(divergences[:, None]).mul_(q)
            return divergences
        log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta), out=self._scratch())
        of_teacher = (log_p - log_m).mul_(log_p.exp_()).sum(-1)
        slope = torch.sub(log_q, log_m, out=log_p)
        of_teacher, of_student = summed(torch.stack([of_teacher, _expected(slope, q)]))
        slope.sub_(of_student[:, None]).mul_(q).mul_(1 - beta)
        return beta * of_teacher + (1 - beta) * of_student

    def _compare_on(self, support: Support, q: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
        """[rows]: the divergences on a support; their slope replaces `log_p`."""
        likely = log_p if support.of_teacher else log_q
        place = likely.topk(min(support.tokens, log_q.shape[-1]), dim=-1).indices
        divergences, slope = _on_support(log_q.gather(-1, place), log_p.gather(-1, place), support, self.how.beta)
        torch.mul(q, -slope.sum(-1, keepdim=True), out=log_p)
        log_p.scatter_add_(-1, place, slope)
        return divergences

    def _compare_across(self, across: Across, q: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
        """[rows]: the distances between two vocabularies; their slope replaces the teacher's logits."""
        ours = theirs = 0.0
        if self.how.merged is not None:
            ours, theirs = (each.to(log_q)[:, None] for each in self.how.merged)
        with torch.enable_grad():
            own = (log_q + ours).requires_grad_()
            distances = across.distances(own, log_p + theirs)
            (slope,) = torch.autograd.grad(distances.sum(), own)
        self.span_slopes = slope.sum(-1)
        self.theirs = slope.sub_(q * self.span_slopes[:, None])
        return distances.detach()

    def slope(self, slopes: Slopes, entropies: Tensor) -> None:
        super().slope(slopes, entropies)
        if slopes.divergences is not None:
            self.x.addcmul_(self.theirs, slopes.divergences[:, None])

    def gradient(self, slopes: Slopes, entropies: Tensor) -> None:
        super().gradient(slopes, entropies)
        self.beyond.zero_()


class NamedRows(TorchRows):
    """Some rows of a student's logits, of whose scores a teacher has named some tokens with their log-probabilities.

    Args:
        named: of these scores.
        support: how they are made a distribution.
        beta: as of `Comparison`.
    """

    def __init__(
        self,
        logits: Tensor,
        target: Tensor,
        projection: Projection,
        scratch: Tensor | None,
        *,
        named: Named,
        support: Support,
        beta: float,
    ):
        super().__init__(logits, target, projection, scratch)
        self.named, self.support, self.beta = named, support, beta
        self.slopes = self.x.new_empty(0)
        """Of the divergences, at the student's log-probabilities of the tokens that are named."""

    def stats(self, want: Want, keep: bool) -> RowStats:
        chosen = self.x.gather(-1, self.named.tokens)
        found = super().stats(want, keep)
        theirs = self.named.logprobs.to(self.x.dtype)
        divergences, self.slopes = _on_support(chosen - found.lse[:, None], theirs, self.support, self.beta)
        return found._replace(divergences=divergences)

    def slope(self, slopes: Slopes, entropies: Tensor) -> None:
        assert slopes.divergences is not None
        at_named = self.slopes * slopes.divergences[:, None]
        of_all = at_named.sum(-1)  # a log-probability falls with all logits alike, as the target's does
        super().slope(slopes._replace(logprobs=slopes.logprobs + of_all), entropies)
        self.x.scatter_add_(-1, self.target, -of_all[:, None])
        self.x.scatter_add_(-1, self.named.tokens, at_named)


def _on_support(ours: Tensor, theirs: Tensor, support: Support, beta: float) -> tuple[Tensor, Tensor]:
    """([rows], [rows, tokens]): the divergences of a student's log-probabilities of some tokens from a teacher's, which
    are -inf where a row has fewer tokens, and their slopes at the student's."""
    absent = theirs == -math.inf
    with torch.enable_grad():
        own = ours.detach().requires_grad_()
        q, p = (_adding_up(each.masked_fill(absent, NOTHING), support) for each in (own, theirs))
        divergences = divergence(q, p, beta)
        (slopes,) = torch.autograd.grad(divergences.sum(), own)
    return divergences.detach(), slopes


def _adding_up(some: Tensor, support: Support) -> Tensor:
    """[rows, ..]: log-probabilities of some tokens, as those of a distribution."""
    together = some.logsumexp(-1, keepdim=True)
    if not support.tail:
        return some - together
    return torch.cat([some, torch.log(-torch.expm1(together.clamp(max=LEAST_LEFT)))], -1)


def _expected(values: Tensor, q: Tensor) -> Tensor:
    """[rows]: the sum of `values`, weighed by the student's probabilities."""
    return torch.linalg.vecdot(values, q)
