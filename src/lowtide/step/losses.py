"""From the outputs of a step's forwards to what goes backward.

A token objective forms its loss in forward. An objective over rows gets their log-probabilities and gives the loss. One
that is no sum over rows gets those of the whole batch first, over all ranks and without gradients. The gradient of a
loss that was worked out before, with respect to each statistic of the scores, is its slope: what a second pass carries
into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.methods.method import Objective, OwnLoss, RowObjective, TokenObjective
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ragged import RaggedBatch
from lowtide.ranks.group import RankGroup
from lowtide.ranks.world import distributed, objects_of_all_ranks
from lowtide.step.cut import Part
from lowtide.step.metrics import Totals
from lowtide.step.models import Models, scores_of


@dataclass(frozen=True)
class Slopes:
    """The gradient of a loss with respect to each statistic of scores that has one."""

    of: dict[str, Tensor]

    @classmethod
    def leaves(cls, output: ScoreOutput) -> dict[str, Tensor]:
        """The statistics of an output that gradients may be of, which want them from now on."""
        return {name: each.requires_grad_() for name, each in output.stats.items() if each.is_floating_point()}

    def product(self, output: ScoreOutput, places: Tensor | None) -> Tensor:
        """The product of slopes and statistics, whose gradient is the loss's.

        Args:
            places: of the output's scores among those of the slopes; None where they are the same.
        """
        terms = [(output.stats[name] * _at(slope, places)).sum() for name, slope in self.of.items()]
        return torch.stack(terms).sum() if terms else output.nothing


def _at(values: Tensor, places: Tensor | None) -> Tensor:
    return values if places is None else values[places.to(values.device)]


@dataclass
class Loss:
    """One of the losses that a step adds up: what is asked of forwards, and what is made of their outputs."""

    models: Models
    objective: Any
    counts: Counts
    """Of all ranks."""
    ranks: int
    """Those with rows of their own; ranks that hold the same rows are one."""
    accumulate: bool
    grad_scale: float
    totals: Totals

    def referred(self, part: Part) -> Tensor | None:
        """[scores]: the reference's log-probabilities of a micro-batch, which are known before activations are held."""
        return None

    def scored(self, piece: RaggedBatch) -> ScoreOutput:
        """A forward without gradients."""
        return self.models.scored(piece, self.objective)

    def forward(self, piece: RaggedBatch) -> ScoreOutput:
        """A forward with gradients."""
        return self.models.forward(piece, scores_of(piece, self.objective, self.accumulate))

    def of_output(self, part: RaggedBatch, output: ScoreOutput, referred: Tensor | None) -> Tensor:
        """What goes backward of a micro-batch of this rank, or of a piece whose loss is its own."""
        raise NotImplementedError

    def read(self, number: int, part: RaggedBatch, output: ScoreOutput, referred: Tensor | None) -> None:
        """Takes in what was scored of a micro-batch, for a `join`."""

    def join(self, device: torch.device, *, over_ranks: bool) -> tuple[dict[int, Slopes], Tensor]:
        """The slopes of what was read, by micro-batch, and the loss: this rank's part of it, or that of the step.

        Args:
            over_ranks: the loss is of the rows of all ranks, which call this together.
        """
        raise NotImplementedError("a loss that is known score by score is not joined")


class TokenLoss(Loss):
    """The loss is known score by score, and formed in forward."""

    def forward(self, piece: RaggedBatch) -> ScoreOutput:
        factor = self.ranks / (self.counts["weight"] or 1.0)
        return self.models.forward(piece, scores_of(piece, self.objective, self.accumulate, factor, self.grad_scale))

    def of_output(self, part: RaggedBatch, output: ScoreOutput, referred: Tensor | None) -> Tensor:
        assert output.loss is not None
        return output.loss

    def join(self, device: torch.device, *, over_ranks: bool) -> tuple[dict[int, Slopes], Tensor]:
        """No slopes, in a row in pieces beside a loss of rows: each piece that goes backward brings its own loss."""
        return {}, torch.zeros((), device=device)


class CallersLoss(Loss):
    """The loss is the caller's."""

    def forward(self, piece: RaggedBatch) -> ScoreOutput:
        if piece.scores == 0:  # so that all ranks run equally many micro-batches
            return self.models.forward(piece, Scores(piece.score_index, piece.score_target))
        with self.models.around():
            return self.objective.compute(self.models.policy, piece, self.counts, self.totals)

    def of_output(self, part: RaggedBatch, output: ScoreOutput, referred: Tensor | None) -> Tensor:
        if part.scores == 0:
            return output.nothing
        assert output.loss is not None
        return output.loss * self.ranks


@dataclass
class RowLoss(Loss):
    """The loss is of rows: a sum over them, or of all rows of a step together."""

    rows: list[Any] = field(default_factory=list)
    """Statistics of the rows that were read so far of a loss of all rows; likewise `leaves`, by micro-batch, what they
    were read from."""
    leaves: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def referred(self, part: Part) -> Tensor | None:
        return self.models.referred(part, self.objective)

    def of_output(self, part: RaggedBatch, output: ScoreOutput, referred: Tensor | None) -> Tensor:
        if part.scores == 0 and not self.objective.beyond_scores:
            return output.nothing
        return self._outcome(self.objective.read(part, output.stats, referred)).loss * self.ranks

    def read(self, number: int, part: RaggedBatch, output: ScoreOutput, referred: Tensor | None) -> None:
        self.leaves[number] = Slopes.leaves(output)
        self.rows.append(self.objective.read(part, output.stats, referred))

    def join(self, device: torch.device, *, over_ranks: bool) -> tuple[dict[int, Slopes], Tensor]:
        own = join_rows(self.rows) if self.rows else None
        everyones = gathered_rows(own, device, self.models.same_rows) if over_ranks else [own]
        loss = self._outcome(join_rows(everyones)).loss
        loss = loss if over_ranks else loss * self.ranks
        leaves = [(number, name, leaf) for number, each in self.leaves.items() for name, leaf in each.items()]
        grads = torch.autograd.grad(loss, [leaf for *_, leaf in leaves], allow_unused=True) if leaves else ()
        slopes = {number: Slopes({}) for number in self.leaves}
        for (number, name, _), grad in zip(leaves, grads, strict=True):
            if grad is not None:
                slopes[number].of[name] = grad * self.ranks if over_ranks else grad
        self.rows, self.leaves = [], {}
        return slopes, loss.detach()

    def _outcome(self, rows: Any) -> Outcome:
        """The loss of rows that are trained on."""
        if self.objective.observe is not None:
            self.objective.observe(rows)
        outcome = self.objective.loss(rows, self.counts)
        self.totals.take_outcome(outcome)
        return outcome


KINDS: Mapping[type[Objective], type[Loss]] = {TokenObjective: TokenLoss, RowObjective: RowLoss, OwnLoss: CallersLoss}


def losses_of(objective: Objective, *given: Any) -> list[Loss]:
    """The losses whose sum is that of an objective.

    Args:
        given: what a `Loss` takes beside the objective, the models before it.
    """
    models, *rest = given
    kinds = [next(kind for each, kind in KINDS.items() if isinstance(term, each)) for term in objective.terms]
    return [kind(models, term, *rest) for kind, term in zip(kinds, objective.terms, strict=True)]


def join_rows(rows: Sequence[Any]) -> Any:
    """Statistics of rows, end to end; they are a dataclass of tensors [rows], or None."""
    first = rows[0]
    if len(rows) == 1:
        return first
    joined = {}
    for each in fields(first):
        values = [getattr(part, each.name) for part in rows]
        joined[each.name] = None if values[0] is None else torch.cat(values)
    return type(first)(**joined)


def gathered_rows(rows: Any, device: torch.device, same: RankGroup | None = None) -> list[Any]:
    """Statistics of this rank's rows, with gradients, and those of the other ranks, in the order of ranks.

    Args:
        rows: None of a rank that has none.
        same: the ranks that hold the same rows as this one, which are taken once.
    """
    if not distributed():
        return [rows]
    leader = dist.get_rank() if same is None else same.leader
    everyones = objects_of_all_ranks((leader, _with_tensors(rows, lambda value: value.detach().cpu())))
    others = {
        rank: _with_tensors(each, lambda value: value.to(device))
        for rank, (first, each) in enumerate(everyones)
        if rank == first and each is not None
    }
    return [rows if rank == leader else each for rank, each in others.items()]


def _with_tensors(rows: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Statistics of rows with each tensor changed."""
    if rows is None:
        return None
    values = {each.name: getattr(rows, each.name) for each in fields(rows)}
    return type(rows)(**{name: None if value is None else change(value) for name, value in values.items()})
