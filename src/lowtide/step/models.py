"""The models of a step, and what is asked of their forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.data.batches.values import (
    DRAW,
    LIKELIHOOD,
    NAMED_LOGPROBS,
    NAMED_TOKENS,
    OLD,
    REFERENCE,
    SPAN_BASE,
    SPAN_TEACHER,
    TEACHER,
)
from lowtide.engine.adapters import adapter_of
from lowtide.engine.chains import why_not_chains
from lowtide.engine.forward import causal_model, same_rows_of, score_shared
from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.engine.over_ranks.stage import Stage, stage_of
from lowtide.engine.reference import ReferenceModel
from lowtide.methods.method import Objective, Scorer
from lowtide.ops.attention.piece_keys import KeyPlace, OnDevice
from lowtide.ops.logits.across_vocabularies import Spans
from lowtide.ops.logits.logit_rows import Named
from lowtide.ragged import WEIGHT, RaggedBatch
from lowtide.ranks.group import RankGroup
from lowtide.ranks.world import distributed
from lowtide.step.chains import Chain
from lowtide.step.cut import Part


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
    runs_on: torch.device | None = None
    """Where micro-batches run; None for where the policy's weights are."""

    @property
    def device(self) -> torch.device:
        """Where micro-batches run."""
        return self.runs_on or next(self.policy.parameters()).device

    @classmethod
    def of(cls, model: nn.Module | Models) -> Models:
        """A model without a reference as the models of a step."""
        return model if isinstance(model, Models) else cls(model)

    @property
    def ranks(self) -> int:
        """Those with rows of their own; ranks that hold the same rows are one."""
        return dist.get_world_size() // self.copies if distributed() else 1

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
    def pairs(self) -> int:
        """So many pairs of a query and a key cost what the products of one token do: in a layer of width h two products
        of h for a pair, and some 12 h^2 weights for a token."""
        return 6 * getattr(causal_model(self.policy).config.get_text_config(), "hidden_size", 0)

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

    def why_not_chains(self, objective: Objective) -> str | None:
        """What keeps rows above the token budget from being run in pieces, as a clause; None if nothing does."""
        of_loss = objective.why_whole_rows
        return of_loss or why_not_pieces(self.policy, self.teacher.models if objective.taught else ())

    def why_whole_rows(self, objective: Objective, batch: RaggedBatch, most: int | None) -> str | None:
        """The same where a row of a batch is above so many tokens; None where none is."""
        fits = most is None or max(batch.row_tokens) <= most
        return None if fits else self.why_not_chains(objective)

    def teaches_ahead(self, objective: Objective, batch: RaggedBatch, most: int | None) -> bool:
        """Whether an evaluation asks the teacher before the student runs: where a row is above so many tokens, or may
        be on another rank whose forwards are this one's too."""
        if most is None or not objective.taught:
            return False
        long = self.together or max(batch.row_tokens) > most
        return long and self.why_not_chains(objective) is None

    @property
    def teacher(self) -> ReferenceModel:
        """The reference of an objective that compares distributions."""
        assert isinstance(self.reference, ReferenceModel), "divergences need a teacher"
        return self.reference

    def placed_states(self, batch: RaggedBatch) -> Tensor:
        """[scores, hidden]: the teacher's hidden states; where ranks split the tokens, 0 at others' scores."""
        return self.teacher.states(batch, placed=True)

    def forward(self, batch: RaggedBatch, scores: Scores) -> ScoreOutput:
        """The policy's forward of one micro-batch; a prompt that several rows share is computed once.

        A teacher goes first, while no activations are held.
        """
        if scores.want.divergences and scores.named is None:
            states = batch.score_values.get(TEACHER)
            states = self.teacher.states(batch) if states is None else states
            scores = replace(scores, teacher=self.teacher.teaching(states))
        with self.around():
            return score_shared(self.policy, batch, scores, padding_free=self.padding_free)

    def unscored(self, piece: RaggedBatch) -> ScoreOutput:
        """The policy's forward of a piece of which nothing is read: its layers keep what later pieces see."""
        part = replace(piece.unscored(), piece=piece.piece)
        return self.forward(part, Scores(part.score_index, part.score_target))

    def adapter_of(self, objective: Objective) -> AbstractContextManager:
        """Entered for forward and backward of an objective: the adapter that its head is read through is active."""
        return adapter_of(self.policy, objective.head)

    def scored(self, piece: RaggedBatch, objective: Objective) -> ScoreOutput:
        """The policy's forward of a micro-batch, or of a piece of one, without gradients."""
        return self.forward(piece, scores_of(piece, objective, accumulate=False))

    def scored_part(self, part: Part, objective: Objective) -> ScoreOutput:
        """The same of a micro-batch in however many pieces; the output is in the order of its scores."""
        return part.joined(Chain(part, self.place()).scores(functools.partial(self.scored, objective=objective)))

    def score(self, part: Part, scorer: Scorer) -> Tensor:
        """[scores, ..]: what a scorer gives of a micro-batch in however many pieces."""
        return part.in_order(Chain(part, self.place()).scores(scorer))

    def referred(self, part: Part, objective: Objective) -> Tensor | None:
        """[scores]: the reference's log-probabilities of a micro-batch, for an objective that wants them."""
        batch = part.batch
        needless = batch.scores == 0 and batch.piece is None and not self.together
        if not objective.needs_reference or needless:
            return None
        if REFERENCE in batch.score_values:
            return batch.score_values[REFERENCE]
        assert self.reference is not None, "an objective with a reference needs one"
        return self.score(part, self.reference)


def why_not_pieces(policy: nn.Module, teachers: Sequence[nn.Module]) -> str | None:
    """What keeps a model, or its teachers, from running rows in pieces, as a clause; None if nothing does."""
    if (found := why_not_chains(policy, causal_model(policy))) is not None:
        return found
    of_teachers = (why_not_chains(each, causal_model(each)) for each in teachers)
    return next((f"of the teacher, {found}" for found in of_teachers if found), None)


def scores_of(
    part: RaggedBatch, objective: Objective, accumulate: bool, factor: float = 1.0, grad_scale: float = 1.0
) -> Scores:
    """What an objective asks of the model's forward."""
    return Scores(
        part.score_index,
        part.score_target,
        want=objective.want,
        temperature=objective.temperature,
        loss=objective.score_loss,
        factor=factor,
        weights=None if objective.score_loss is None else part.score_values.get(WEIGHT),
        old=None if objective.score_loss is None else part.score_values.get(OLD),
        grad_scale=grad_scale,
        accumulate=accumulate,
        aux_loss=objective.aux_coefficient != 0,
        head=objective.head,
        beta=objective.beta,
        support=objective.support,
        named=named_in(part),
        across=objective.across,
        spans=spans_of(part),
        draws=part.score_values.get(DRAW),
    )


def named_in(part: RaggedBatch) -> Named | None:
    """What a teacher named at the scores of a batch, of which no more is known; None of others."""
    said = part.score_values
    return Named(said[NAMED_TOKENS], said[NAMED_LOGPROBS]) if NAMED_TOKENS in said else None


def spans_of(part: RaggedBatch) -> Spans | None:
    """The spans of the scores of a batch that was aligned with a teacher of another vocabulary; None of others."""
    said = part.score_values
    return Spans(said[SPAN_BASE], said[SPAN_TEACHER], said.get(LIKELIHOOD)) if SPAN_BASE in said else None
