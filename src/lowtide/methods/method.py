"""What a post-training method is: options, data, an objective over scored tokens, and nothing of a Trainer.

Trainer, planner, command line and docs read the table in `lowtide.methods`; a new method is one file beside this one
and one row there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from torch import Tensor, nn

from lowtide.engine.heads.head import Head, ScoreOutput
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.methods.online.learning import Learning
from lowtide.methods.shared.options import StoredReference, TeacherOptions
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.rows import RowLayout
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ops.float64 import to_float64
from lowtide.ops.logits.across_vocabularies import Across
from lowtide.ops.logits.linear_logprobs import NOTHING_MORE, ScoreLoss
from lowtide.ops.logits.logit_rows import Support, Want
from lowtide.ragged import WEIGHT, RaggedBatch

EXPERTS = "the load-balancing loss of its experts is of whole rows (router_aux_loss_coef=0 leaves it out)"
"""What keeps a mixture of experts from running rows in pieces; `OWN` keeps a loss of the caller's."""
OWN = "the loss is not the method's own"
Scorer = Callable[[RaggedBatch], Tensor]
"""From a batch to its log-probabilities [scores], without gradient."""


def score_weight(batch: RaggedBatch) -> Tensor | int:
    """The sum of the weights of the scores; their number where each is 1."""
    weights = batch.score_values.get(WEIGHT)
    return batch.scores if weights is None else to_float64(weights).sum()


class FormedInForward:
    """What is alike of losses that are known once a micro-batch's forward is over; as of `RowObjective`."""

    over: ClassVar[str] = "score"
    """What has to be scored before a loss is known."""
    head: ClassVar[None] = None
    needs_reference: ClassVar[bool] = False
    baseline: ClassVar[None] = None
    running: ClassVar[None] = None

    @property
    def terms(self) -> tuple[Self]:
        return (self,)

    def divisor(self, batch: RaggedBatch) -> Tensor | int:
        """What the sum over the scores of a batch is divided by for its mean."""
        return score_weight(batch)


@dataclass(frozen=True)
class TokenObjective(FormedInForward):
    """A loss that is a sum over scores, divided by their number in the whole batch of an optimizer step; where scores
    have weights, a sum of weighted losses, divided by the sum of the weights."""

    loss: ScoreLoss
    want: Want = NOTHING_MORE
    """The statistics that the loss or the metrics need."""
    aux_coefficient: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts; 0 leaves it out."""
    temperature: float = 1.0
    """Divisor of the logits before they are scored."""
    beta: float = 0.5
    """Of the divergences from a teacher, where `want` asks for these; the run's reference is the teacher then."""
    support: Support | None = None
    """The tokens that these compare; None for all."""
    across: Across | None = None
    """How these compare two vocabularies, where the teacher has another one."""
    mean_over_rows: bool = False
    """The sum is divided by the rows of the whole batch, whatever the weights of their scores add up to."""

    @property
    def inner(self) -> TokenObjective:
        """The method's own objective: itself."""
        return self

    @property
    def score_loss(self) -> ScoreLoss | None:
        """The loss of each score, which is formed in forward."""
        return self.loss

    @property
    def taught(self) -> bool:
        """Whether the run's reference is a teacher, whose hidden states it needs."""
        return self.want.divergences and not (self.support is not None and self.support.named)

    @property
    def why_whole_rows(self) -> str | None:
        """What of the loss keeps rows from being run in pieces, as a clause; None if nothing does."""
        return EXPERTS if self.aux_coefficient else None

    def counts(self, batch: RaggedBatch) -> Counts:
        return {"scores": batch.scores, "weight": float(self.divisor(batch))}

    def divisor(self, batch: RaggedBatch) -> Tensor | int:
        return batch.rows if self.mean_over_rows else score_weight(batch)


@dataclass(frozen=True)
class RowObjective:
    """A loss of rows: their scores are read into statistics of rows, [rows] each, and these into the loss.

    The statistics are a dataclass of tensors, so that those of several micro-batches, or ranks, can be joined.
    """

    read: Callable[[RaggedBatch, Any, Tensor | None], Any]
    """From a batch, what the head gives (`ScoreOutput.stats`), and the reference's log-probabilities [scores], to
    statistics."""
    loss: Callable[[Any, Counts], Outcome]
    counts: Callable[[RaggedBatch], Counts]
    """The denominators, counted before the batch is split, and added up over ranks."""
    want: Want = NOTHING_MORE
    aux_coefficient: float = 0.0
    temperature: float = 1.0
    """As of `TokenObjective`; the reference has its own."""
    mean_over: str | None = None
    """The count that the loss of an evaluation is a mean over, by its name in `counts`; None for rows."""
    head: type[Head] | None = None
    """The head that is read; None for the model's own."""
    needs_reference: bool = False
    whole: bool = False
    """The loss is no sum over rows: it has to see the whole batch of an optimizer step at once."""
    baseline: Callable[[RaggedBatch, Scorer, Scorer], tuple[RaggedBatch, Counts]] | None = None
    """Statistics of the whole batch that the loss needs first, from the policy's and the reference's scores; and
    the batch to train on."""
    running: Any = None
    """What the loss carries from step to step, an object with plain attributes; put back when a step is repeated."""
    observe: Callable[[Any], None] | None = None
    """Called before the loss of a training step, with the statistics of the whole batch, to carry them in `running`.
    Evaluation does not call it."""
    beyond_scores: bool = False
    """Rows in which nothing is scored have a loss too."""
    beside: RowObjective | TokenObjective | None = None
    """A second loss, which is added to this one. Each goes forward and backward by itself, through the adapter of its
    head, so that no more is held than for one; its counts are this one's."""

    score_loss: ClassVar[None] = None
    """As of `TokenObjective`, as what follows."""
    beta: ClassVar[float] = 0.0
    support: ClassVar[None] = None
    across: ClassVar[None] = None

    @property
    def inner(self) -> RowObjective:
        return self

    @property
    def taught(self) -> bool:
        """As of `TokenObjective`, of the loss beside."""
        return self.beside is not None and self.beside.taught

    @property
    def why_whole_rows(self) -> str | None:
        return EXPERTS if self.aux_coefficient else None

    @property
    def over(self) -> str:
        """What has to be scored before a loss is known: a row, or the whole batch of a step."""
        return "step" if self.whole else "row"

    @property
    def terms(self) -> tuple[RowObjective | TokenObjective, ...]:
        """The losses whose sum is the loss."""
        return (self,) if self.beside is None else (self, self.beside)


@dataclass(frozen=True)
class OwnLoss(FormedInForward):
    """In place of an objective: a loss that its caller computes with forwards of its own."""

    inner: TokenObjective | RowObjective
    """The method's objective, which the caller may use; rows and scores are counted as it counts them."""
    compute: Callable[[nn.Module, RaggedBatch, Counts, Any], ScoreOutput]
    """From the model, a micro-batch, the counts of the whole step over all ranks, and the `step.metrics.Totals` that
    take in metrics, to an output whose `loss` is the micro-batch's part of the loss of the step."""
    want: ClassVar[Want] = NOTHING_MORE
    score_loss: ClassVar[None] = None
    temperature: ClassVar[float] = 1.0
    beta: ClassVar[float] = 0.0
    support: ClassVar[None] = None
    across: ClassVar[None] = None
    taught: ClassVar[bool] = False
    why_whole_rows: ClassVar[str] = OWN

    @property
    def aux_coefficient(self) -> float:
        return self.inner.aux_coefficient

    def counts(self, batch: RaggedBatch) -> Counts:
        return self.inner.counts(batch)


Objective = TokenObjective | RowObjective | OwnLoss


@dataclass(frozen=True)
class Labels:
    """The labels that a head gives logits of."""

    names: Sequence[str]
    """In the order of their numbers."""
    scored: Mapping[str, int] | None = None
    """How many scores of the training rows have each; None where they were not counted, as those of a stream."""
    problem: str | None = None
    """What they are, as transformers' `problem_type` names it; None of the labels of tokens."""


class Findings(Protocol):
    """Metrics that need all scores of an evaluation at once, those of all ranks."""

    def keep(self, batch: RaggedBatch, output: ScoreOutput) -> Mapping[str, np.ndarray]:
        """What is kept of a micro-batch, in host memory: arrays of one length, by name."""
        ...

    def metrics(self, kept: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The metrics, from what was kept of all micro-batches, in whatever order."""
        ...


@dataclass(frozen=True)
class Method:
    """One way to post-train a model, declared."""

    name: str
    """As on the command line."""
    title: str
    options: type
    """A dataclass of its options; its config class inherits from it."""
    rows: RowLayout
    """The data that it takes, and how a row becomes segments and scores."""
    objective: Callable[..., Objective]
    """From options, and the `labels` where rows have them, to the objective."""
    paper: Paper | None = None
    """Where it is from."""
    head: type[Head] = LanguageModel
    """What it reads off the model's hidden states."""
    own_loss: bool = False
    """Whether a loss that a user writes, on padded batches with logits, can take the objective's place."""
    findings: Callable[[Any, Labels], Findings] | None = None
    """From options and labels to what an evaluation finds beside its sums."""
    derived_metrics: Callable[[Mapping[str, float]], dict[str, float]] | None = None
    """Metrics that follow from those that were added up."""

    generates: bool = False
    """Whether an evaluation may have the model write targets (`predict_with_generate`)."""
    arguments: tuple[str, ...] = ()
    """The trainer's arguments in TRL's order, where they are other than those of methods of its kind."""

    @property
    def writes(self) -> Learning | None:
        """What is made of what the policy writes, for a method that learns from that: the options are
        `methods.online.rollouts.RolloutOptions` then."""
        return getattr(self.rows, "learning", None)

    @property
    def compares(self) -> bool:
        """Whether the policy may be compared with a reference; the options say whether it is."""
        return issubclass(self.options, StoredReference)

    @property
    def taught(self) -> bool:
        """Whether the reference is a teacher, another model with a vocabulary of the same tokens."""
        return issubclass(self.options, TeacherOptions)
