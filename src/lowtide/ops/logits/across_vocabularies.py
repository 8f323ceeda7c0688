"""How far distributions over two vocabularies are apart, for a student and a teacher with other tokenizers.

The texts that both read are cut where both tokenizers end a token; what lies between two such places is a span. The
distribution of a span is that of one of its tokens times the probabilities of its others, and so it adds up to less
than 1 (Patiño et al., "Unlocking On-Policy Distillation for Any Model Family", 2025; TRL's GOLD). Two of them are
compared

- by the universal logit distillation loss (Boizard et al., arXiv 2402.12030), which knows nothing of what tokens mean:
  the sum of |p_i - q_i| over the probabilities of each in falling order;
- or, of the tokens that both vocabularies have, by the generalized Jensen-Shannon divergence of
  `ops.logits.compared_rows`, and of the others as above, each with a weight.

Probabilities below 1e-8 count as 1e-8 in logarithms, as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

LEAST = math.log(1e-8)
"""The log of the smallest probability."""
NO_SPAN = torch.iinfo(torch.long).min
"""In the place of `Spans.base` of a score that is in none."""


class Common(NamedTuple):
    """The tokens that both vocabularies have, by the numbers of each, and how they count."""

    ours: Int[Tensor, " common"]
    theirs: Int[Tensor, " common"]
    beta: float
    """Of the divergence over these: 0 is KL(teacher || student), 1 is KL(student || teacher)."""
    weights: tuple[float, float] | None = None
    """Of these tokens, and of all others; None: the share of the teacher's vocabulary that is common, and the rest."""

    def columns(self, ours: int, theirs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tokens of each vocabulary that both have, and all others, of vocabularies of so many rows."""
        return self.ours, self.theirs, _without(ours, self.ours), _without(theirs, self.theirs)


@dataclass(frozen=True)
class Across:
    """How distributions over two vocabularies are compared."""

    common: Common | None = None
    """None: all tokens by their probabilities in falling order."""
    temperature: float = 1.0
    """Divisor of the teacher's logits."""
    _columns: dict[tuple[torch.device, int, int], tuple[Tensor, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The columns of `common`, and all others, of each by device and sizes: looked up once, not with every block."""

    def distances(
        self, log_q: Float[Tensor, "rows ours"], log_p: Float[Tensor, "rows theirs"]
    ) -> Float[Tensor, " rows"]:
        """How far a student's log-probabilities are from a teacher's, with gradients."""
        if self.common is None:
            return sorted_distances(log_q, log_p)
        key = log_q.device, log_q.shape[1], log_p.shape[1]
        if key not in self._columns:
            self._columns[key] = tuple(each.to(log_q.device) for each in self.common.columns(*key[1:]))
        ours, theirs, our_others, their_others = self._columns[key]
        q, p = (each.clamp(min=LEAST) for each in (log_q.index_select(1, ours), log_p.index_select(1, theirs)))
        share = len(theirs) / max(log_p.shape[1], 1)
        of_common, of_others = self.common.weights or (share, 1 - share)
        others = sorted_distances(log_q.index_select(1, our_others), log_p.index_select(1, their_others))
        return of_common * divergence(q, p, self.common.beta) + of_others * others


def divergence(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """[rows]: the divergences of a student's log-probabilities [rows, tokens] from a teacher's, with gradients."""
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    of_teacher = (log_p.exp() * (log_p - log_m)).sum(-1)
    return beta * of_teacher + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(-1)


def sorted_distances(log_q: Float[Tensor, "rows ours"], log_p: Float[Tensor, "rows theirs"]) -> Float[Tensor, " rows"]:
    """The sum of the differences between probabilities in falling order; the smaller vocabulary is filled up with 0."""
    if 0 in (log_q.shape[1], log_p.shape[1]):
        return log_q.sum(-1) * 0.0
    q, p = (each.exp().sort(dim=-1, descending=True).values for each in (log_q, log_p))
    most = max(q.shape[1], p.shape[1])
    return (F.pad(q, (0, most - q.shape[1])) - F.pad(p, (0, most - p.shape[1]))).abs().sum(-1)


def _without(count: int, some: Tensor) -> Tensor:
    """Numbers below `count` that are not among some."""
    kept = torch.ones(count, dtype=torch.bool)
    kept[some] = False
    return torch.nonzero(kept).flatten()


class Spans(NamedTuple):
    """The spans that scores belong to, and what the teacher says of each."""

    base: Int[Tensor, " scores"]
    """How many scores further on the one is whose distribution is the span's; 0 for that itself, `NO_SPAN` for none."""
    theirs: Float[Tensor, " scores"]
    """At that one, the log-probability of the teacher's other tokens of the span together."""
    likelihood: Float[Tensor, " scores"] | None = None
    """How much the negative log-likelihood of each score counts beside; None: nothing."""


class Merged(NamedTuple):
    """The scores whose distributions are those of spans."""

    place: Int[Tensor, " spans"]
    others: Int[Tensor, " others"]
    """The other scores of spans."""
    into: Int[Tensor, " others"]
    """The score that each of these goes with."""

    @classmethod
    def of(cls, spans: Spans) -> Merged:
        others = torch.nonzero((spans.base != 0) & (spans.base != NO_SPAN)).flatten()
        return cls(torch.nonzero(spans.base == 0).flatten(), others, others + spans.base[others])

    def loss(
        self,
        scores: int,
        logprobs: Float[Tensor, " others"],
        loss: Callable[[Float[Tensor, " spans"]], tuple[Float[Tensor, ""], Float[Tensor, " spans"]]],
    ) -> Float[Tensor, ""]:
        """The loss, with a gradient at `logprobs` too.

        Args:
            scores: how many there are.
            logprobs: of the other tokens of spans.
            loss: from the log-probabilities of the other tokens of each span together to the loss, and its gradient
                with respect to these.
        """
        logprobs = logprobs.clamp(min=LEAST)
        known = logprobs.detach()
        together = known.new_zeros(scores).index_add(0, self.into, known)[self.place]
        total, slopes = loss(together)
        slopes = known.new_zeros(scores).index_copy(0, self.place, slopes.to(known))[self.into]
        return total + ((logprobs - known) * slopes).sum().to(total)
