"""How the micro-batches of one optimizer step are run: the models, and from a micro-batch to its loss.

A token objective forms its loss in forward. An objective over rows gets its log-probabilities and gives the loss. One
that is no sum over rows gets those of the whole batch first, over all ranks and without gradients; its gradient with
respect to them is what the second pass carries into the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.data.batches.values import DRAW, REFERENCE, TEACHER
from lowtide.engine.adapters import adapter_of
from lowtide.engine.chains import why_not_chains
from lowtide.engine.forward import causal_model, same_rows_of, score_shared
from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.engine.reference import ReferenceModel, teaching
from lowtide.engine.stage import Stage, stage_of
from lowtide.methods.method import Objective, RowObjective, Scorer, TokenObjective
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ops.piece_keys import KeyPlace, OnDevice
from lowtide.ragged import RaggedBatch
from lowtide.ranks.group import RankGroup
from lowtide.ranks.world import distributed
from lowtide.step.chains import Chain, Slopes, in_row_order, joined_output
from lowtide.step.metrics import Totals
from lowtide.step.pieces import LongRow
from lowtide.step.rank_sync import RankSync, random_state, set_random_state

EXPERTS = "the load-balancing loss of its experts is of whole rows (router_aux_loss_coef=0 leaves it out)"
"""What keeps a mixture of experts from running rows in pieces."""


@dataclass(frozen=True)
class Models:
    """What a step runs: the policy, and the reference if the objective has one."""

    policy: nn.Module
    """Prepared by `engine.forward.install`, wrapped or not."""
    reference: Scorer | None = None
    """Of a micro-batch; not called where the batch knows the reference's log-probabilities already."""
    padding_free: bool = True
    """False runs the padded path."""
    around: Callable[[], AbstractContextManager] = nullcontext
    """Entered for each forward of the policy: where a memory technique takes hold of what autograd saves."""
    together: bool = False
    """Each forward is one of all ranks, since it gathers weights that are sharded."""
    place: Callable[[], KeyPlace] = OnDevice
    """Makes the place where the keys of a long row wait."""

    @property
    def same_rows(self) -> RankGroup | None:
        """The ranks that hold the same rows and compute them together; None where each rank has rows of its own."""
        return same_rows_of(self.policy)

    @property
    def stage(self) -> Stage | None:
        """What lies on this rank of a pipeline; None where all of the model does."""
        return stage_of(causal_model(self.policy))

    @property
    def stages(self) -> int:
        """Ranks that the layers of the policy are split between."""
        return 1 if self.stage is None else self.stage.pipeline.size

    @property
    def copies(self) -> int:
        """How many ranks hold the same rows."""
        return 1 if self.same_rows is None else self.same_rows.size

    @property
    def waited_for(self) -> bool:
        """Whether other ranks wait for this one within a forward, so that none can repeat one by itself."""
        return self.together or self.copies > 1

    @property
    def leads(self) -> bool:
        """Whether this rank adds to the metrics: of those that hold the same rows one does, of a pipeline the last."""
        if self.stage is not None:
            return self.stage.pipeline.is_last
        return self.same_rows is None or self.same_rows.rank == 0

    def why_not_chains(self, objective: Objective | OwnLoss) -> str | None:
        """What keeps rows above the token budget from being run in pieces, as a clause; None if nothing does."""
        if isinstance(objective, OwnLoss):
            return "the loss is not the method's own"
        if objective.aux_coefficient:
            return EXPERTS
        return why_not_pieces(self.policy, self.teacher.model if objective.taught else None)

    def teaches_ahead(self, objective: Objective, batch: RaggedBatch, most: int | None) -> bool:
        """Whether an evaluation asks the teacher before the student runs: where a row is above so many tokens, or may
        be on another rank whose forwards are this one's too."""
        if most is None or not objective.taught:
            return False
        long = self.together or max(batch.row_tokens, default=0) > most
        return long and self.why_not_chains(objective) is None

    @property
    def teacher(self) -> ReferenceModel:
        """The reference of an objective that compares distributions."""
        assert isinstance(self.reference, ReferenceModel), "divergences need a teacher"
        return self.reference

    def forward(self, batch: RaggedBatch, scores: Scores) -> ScoreOutput:
        """The policy's forward of one micro-batch; a prompt that several rows share is computed once.

        A teacher goes first, while no activations are held.
        """
        if scores.want.divergences:
            states = batch.score_values.get(TEACHER)
            states = self.teacher.states(batch) if states is None else states
            scores = replace(scores, teacher=teaching(self.teacher.model, states))
        with self.around():
            return score_shared(self.policy, batch, scores, padding_free=self.padding_free)

    def forward_row(self, row: LongRow, objective: Objective) -> ScoreOutput:
        """The policy's forward of a row in pieces, without gradients; the output is in the order of its scores."""
        run = functools.partial(self._scored, objective)
        return joined_output(row, Chain(row, self.place()).scores(run))

    def _scored(self, objective: Objective, part: RaggedBatch) -> ScoreOutput:
        return self.forward(part, scores_of(part, objective, accumulate=False))

    def unscored(self, piece: RaggedBatch) -> ScoreOutput:
        """The policy's forward of a piece of which nothing is read: its layers keep what later pieces see."""
        part = replace(piece.unscored(), piece=piece.piece)
        return self.forward(part, Scores(part.score_index, part.score_target))

    def adapter_of(self, objective: Objective | OwnLoss) -> AbstractContextManager:
        """Entered for forward and backward of an objective: the adapter that its head is read through is active."""
        return adapter_of(self.policy, getattr(objective, "head", None))

    def referred(self, batch: RaggedBatch, objective: RowObjective) -> Tensor | None:
        """[scores]: the reference's log-probabilities of one micro-batch, for an objective that wants them."""
        needless = batch.scores == 0 and batch.piece is None and not self.together
        if not objective.needs_reference or needless:
            return None
        if REFERENCE in batch.score_values:
            return batch.score_values[REFERENCE]
        assert self.reference is not None, "an objective with a reference needs one"
        return self.reference(batch)

    def referred_of_row(self, row: LongRow, objective: RowObjective) -> Tensor | None:
        """The same of a row that is run in pieces."""
        if objective.needs_reference and REFERENCE not in row.batch.score_values:
            assert self.reference is not None, "an objective with a reference needs one"
            return in_row_order(row, Chain(row, self.place()).scores(self.reference))
        return self.referred(row.batch, objective)


def why_not_pieces(policy: nn.Module, teacher: nn.Module | None) -> str | None:
    """What keeps a model, or its teacher, from running rows in pieces, as a clause; None if nothing does."""
    found = why_not_chains(policy, causal_model(policy))
    if found is None and teacher is not None:
        found = why_not_chains(teacher, causal_model(teacher))
        return found and f"of the teacher, {found}"
    return found


@dataclass
class MicrobatchRun:
    """From a micro-batch to its output and its loss."""

    models: Models
    objective: Any
    counts: Counts
    ranks: int
    """Those with rows of their own; ranks that hold the same rows are one."""
    accumulate: bool

    def __call__(self, number: int, part: RaggedBatch) -> tuple[ScoreOutput, Tensor]:
        output = self.forward(number, part)
        return output, self.loss_of(number, part, output)

    def forward(self, number: int, part: RaggedBatch) -> ScoreOutput:
        """What the model gives for a micro-batch, with gradients."""
        raise NotImplementedError

    def loss_of(self, number: int, part: RaggedBatch, output: ScoreOutput) -> Tensor:
        """What goes backward of it."""
        raise NotImplementedError

    def slopes_of(self, number: int, chain: Chain) -> tuple[Slopes | None, Tensor | None]:
        """The first pass of a row in pieces. Returns the gradient of the loss at each score, and the loss; None where
        each piece has a loss of its own."""
        raise NotImplementedError

    def first_forward(self, part: RaggedBatch) -> ScoreOutput:
        """One forward of the first pass of a row in pieces."""
        return self.models.unscored(part)

    def first_forwards(self, row: LongRow) -> int:
        """Forwards of the first pass of a row in pieces."""
        return len(row.pieces)

    def of_piece(self, number: int, part: RaggedBatch) -> ScoreOutput:
        """What the model gives for a piece of a long row, with gradients."""
        return self.forward(number, part)

    def piece_forward(self, number: int, chain: Chain, piece: int) -> ScoreOutput:
        """The same in the second pass of a row: a piece draws what it drew in the first."""
        with chain.replayed(piece):
            return self.of_piece(number, chain.batch(piece))

    def piece_loss(self, number: int, chain: Chain, piece: int, slopes: Slopes | None, output: ScoreOutput) -> Tensor:
        """What goes backward of a piece.

        Args:
            slopes: of `slopes_of`.
        """
        if slopes is None:
            return self.loss_of(number, chain.row.pieces[piece].batch, output)
        return slopes.product(output, chain.row.pieces[piece].scores)

    def begin(self) -> None:
        """What comes before the first micro-batch."""

    def reported(self, loss: Tensor) -> Tensor:
        """The step's loss, from the sum of the losses that went backward."""
        return loss

    def outcome(self, rows: Any) -> Outcome:
        """The loss of rows that are trained on."""
        if self.objective.observe is not None:
            self.objective.observe(rows)
        return self.objective.loss(rows, self.counts)


@dataclass
class TokenRun(MicrobatchRun):
    """The loss is known score by score, and formed in forward."""

    grad_scale: float

    def forward(self, number: int, part: RaggedBatch) -> ScoreOutput:
        factor = self.ranks / max(self.counts["scores"], 1)
        return self.models.forward(part, scores_of(part, self.objective, self.accumulate, factor, self.grad_scale))

    def loss_of(self, number: int, part: RaggedBatch, output: ScoreOutput) -> Tensor:
        assert output.loss is not None
        return output.loss

    def slopes_of(self, number: int, chain: Chain) -> tuple[None, None]:
        chain.first_pass(self.first_forward, inner_only=True)
        return None, None

    def first_forwards(self, row: LongRow) -> int:
        return row.inner


@dataclass
class RowRun(MicrobatchRun):
    """The loss is a sum over rows."""

    totals: Totals
    own: int
    """Micro-batches with rows of this rank; those after them are empty, so that all ranks run equally many."""
    referred: Tensor | None = None
    """The reference's log-probabilities of the micro-batch that runs."""

    def forward(self, number: int, part: RaggedBatch) -> ScoreOutput:
        self.referred = self.models.referred(part, self.objective)  # first, while no activations are held
        return self.models.forward(part, scores_of(part, self.objective, self.accumulate))

    def loss_of(self, number: int, part: RaggedBatch, output: ScoreOutput) -> Tensor:
        if number >= self.own or (part.scores == 0 and not self.objective.beyond_scores):
            return output.nothing
        outcome = self.outcome(self.objective.read(part, output.stats, self.referred))
        self.totals.take_outcome(outcome)
        return outcome.loss * self.ranks

    def slopes_of(self, number: int, chain: Chain) -> tuple[Slopes, Tensor]:
        row = chain.row
        referred = self.models.referred_of_row(row, self.objective)
        output = joined_output(row, chain.first_pass(self.first_forward))
        leaves = Slopes.leaves(output)
        outcome = self.outcome(self.objective.read(row.batch, output.stats, referred))
        self.totals.take_outcome(outcome)
        loss = outcome.loss * self.ranks
        return Slopes.from_loss(loss, leaves), loss.detach()

    def first_forward(self, part: RaggedBatch) -> ScoreOutput:
        return self.models.forward(part, scores_of(part, self.objective, accumulate=False))

    def of_piece(self, number: int, part: RaggedBatch) -> ScoreOutput:
        return self.models.forward(part, scores_of(part, self.objective, self.accumulate))


@dataclass(frozen=True)
class OwnLoss:
    """In place of an objective: a loss that its caller computes with forwards of its own."""

    inner: TokenObjective | RowObjective
    """The method's objective, which the caller may use; rows and scores are counted as it counts them."""
    compute: Callable[[nn.Module, RaggedBatch, Counts, Totals], ScoreOutput]
    """From the model, a micro-batch, the counts of the whole step over all ranks, and what takes in metrics, to an
    output whose `loss` is the micro-batch's part of the loss of the step."""

    @property
    def aux_coefficient(self) -> float:
        return self.inner.aux_coefficient

    @property
    def taught(self) -> bool:
        """Whether forwards are told before what the caller does not make by itself; never."""
        return False

    def counts(self, batch: RaggedBatch) -> Counts:
        return self.inner.counts(batch)


@dataclass
class OwnRun(MicrobatchRun):
    """The loss is the caller's."""

    totals: Totals

    def forward(self, number: int, part: RaggedBatch) -> ScoreOutput:
        if part.scores == 0:  # so that all ranks run equally many micro-batches
            return self.models.forward(part, Scores(part.score_index, part.score_target))
        with self.models.around():
            return self.objective.compute(self.models.policy, part, self.counts, self.totals)

    def loss_of(self, number: int, part: RaggedBatch, output: ScoreOutput) -> Tensor:
        if part.scores == 0:
            return output.nothing
        assert output.loss is not None
        return output.loss * self.ranks


@dataclass
class WholeRun(MicrobatchRun):
    """The loss is of the whole batch over all ranks: a first pass gives its gradient at each log-probability."""

    totals: Totals
    parts: Sequence[RaggedBatch | LongRow]
    sync: RankSync
    device: torch.device

    def __post_init__(self) -> None:
        self.random: list[list[Tensor]] = []
        self.slopes: dict[int, Tensor] = {}
        """By micro-batch, the gradient of the loss at each of its log-probabilities."""

    def begin(self) -> None:
        """The first pass: the loss of the whole batch, and its gradient with respect to each log-probability.

        Raises:
            OutOfMemory: a rank ran out of memory in it; all ranks raise.
        """
        leaves: dict[int, Tensor] = {}
        rows: list[Any] = []
        with self.sync.local(waited_for=self.models.waited_for):
            self._first_pass(leaves, rows)
        self.sync.meet(self.device)
        own = join_rows(rows) if rows else None
        outcome = self.outcome(join_rows(gathered_rows(own, self.device, self.models.same_rows)))
        slopes = torch.autograd.grad(outcome.loss, [*leaves.values()]) if leaves else ()
        self.slopes = dict(zip(leaves, slopes, strict=True))
        self.loss = outcome.loss.detach()
        self.totals.take_outcome(outcome)

    def _first_pass(self, leaves: dict[int, Tensor], rows: list[Any]) -> None:
        for number, part in enumerate(self.parts):
            whole = part.batch if isinstance(part, LongRow) else part
            self.sync.micro_batch, self.sync.part = number, whole
            self.random.append(random_state(self.device))
            if part.scores == 0 and not self.models.together:
                continue
            if isinstance(part, LongRow):
                referred = self.models.referred_of_row(part, self.objective)
                output = self.models.forward_row(part, self.objective)
            else:
                referred = self.models.referred(part, self.objective)
                with torch.no_grad():
                    output = self.models.forward(part, scores_of(part, self.objective, accumulate=False))
            if part.scores == 0:
                continue
            leaves[number] = output.scored.requires_grad_()
            rows.append(self.objective.read(whole, output.stats, referred))

    def slopes_of(self, number: int, chain: Chain) -> tuple[Slopes, None]:
        set_random_state(self.random[number], self.device)
        chain.first_pass(self.first_forward)
        return Slopes({"scored": self.slopes.pop(number) * self.ranks}), None

    def forward(self, number: int, part: RaggedBatch) -> ScoreOutput:
        if number < len(self.random):
            set_random_state(self.random[number], self.device)  # the dropout of the first pass
        return self.models.forward(part, scores_of(part, self.objective, self.accumulate))

    def loss_of(self, number: int, part: RaggedBatch, output: ScoreOutput) -> Tensor:
        slope = self.slopes.pop(number) if part.scores else 0.0
        return (output.scored * slope).sum() * self.ranks

    def reported(self, loss: Tensor) -> Tensor:
        return self.loss


def scores_of(
    part: RaggedBatch, objective: Objective, accumulate: bool, factor: float = 1.0, grad_scale: float = 1.0
) -> Scores:
    """What an objective asks of the model's forward."""
    return Scores(
        part.score_index,
        part.score_target,
        want=objective.want,
        temperature=objective.temperature,
        loss=objective.loss if isinstance(objective, TokenObjective) else None,
        factor=factor,
        grad_scale=grad_scale,
        accumulate=accumulate,
        aux_loss=objective.aux_coefficient != 0,
        head=objective.head if isinstance(objective, RowObjective) else None,
        beta=objective.beta if isinstance(objective, TokenObjective) else 0.0,
        draws=part.score_values.get(DRAW),
    )


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
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (leader, _with_tensors(rows, lambda value: value.detach().cpu())))
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
