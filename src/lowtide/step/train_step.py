"""One optimizer step, up to the gradients: plan, cut, run.

A function of model, batch and objective; trainers call it from a subclass of `transformers.Trainer`, the examples
call it bare. The loss is a sum over micro-batches over denominators that are counted before the batch is cut and over
all ranks, so that however the batch is cut, the gradients are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowtide.methods.method import Objective, OwnLoss
from lowtide.objectives.outcome import Counts
from lowtide.ops.float64 import float64_device
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import distributed, gathered
from lowtide.step.cut import Part, cut, idle_part
from lowtide.step.evaluate import with_baseline, with_reference
from lowtide.step.execute import TOKENS, Backward, Execution
from lowtide.step.losses import losses_of
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.pipeline import run_through_stages
from lowtide.step.rank_sync import RankSync, check_finite
from lowtide.step_plan import (
    Act,
    Limits,
    MicroBatch,
    Needs,
    Passes,
    StepPlan,
    Summary,
    cut_rows,
    even_acts,
    local_acts,
    pieces_first,
)


def train_step(
    model: nn.Module | Models,
    batch: RaggedBatch,
    objective: Objective,
    *,
    limits: Limits = Limits(),
    backward: Backward = Backward(),
    totals: Totals | None = None,
) -> Tensor:
    """Adds the gradients of one optimizer step to the model's parameters.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not; or `Models`, where there is a reference.
        batch: the whole local batch of the step; gradient accumulation is folded in.
        limits: of a micro-batch.
        backward: how it goes backward, and meets other ranks.
        totals: takes in the sums behind the metrics.

    Returns:
        The loss of the step, so scaled that its mean over ranks is the loss of the whole batch.

    Raises:
        ValueError: a row is above the token budget and cannot be run in pieces.
        OutOfMemory: this rank or another ran out of memory; gradients are half formed, nothing else has changed.
        NotFinite: the loss of this rank or of another is not finite; likewise.
    """
    step = Step.planned(Models.of(model), batch, objective, limits, backward)
    return step.run(backward, totals)


@dataclass(frozen=True)
class Step:
    """An optimizer step that is planned, and may be run more than once."""

    models: Models
    batch: RaggedBatch
    objective: Objective
    plan: StepPlan
    needs: Needs
    said: Said

    @classmethod
    def planned(
        cls,
        models: Models,
        batch: RaggedBatch,
        objective: Objective,
        limits: Limits,
        backward: Backward,
    ) -> Step:
        """The step of a batch; all ranks call this together.

        Raises:
            ValueError: a row is above the token budget and cannot be run in pieces.
            OutOfMemory: a rank ran out of memory in what the objective scores first.
        """
        stands_in = batch.stands_in
        batch = idle_part(batch, limits.tokens).batch if stands_in else batch
        batch, known = _synced_baseline(models, batch, objective, limits)
        batch = replace(batch, stands_in=stands_in)
        needs = needs_of(models, batch, objective, limits, backward)
        own = {**objective.counts(batch), **known, TOKENS: batch.tokens}
        return cls._agreed(models, batch, objective, limits, needs, dict.fromkeys(own, 0) if stands_in else own)

    @classmethod
    def _agreed(
        cls,
        models: Models,
        batch: RaggedBatch,
        objective: Objective,
        limits: Limits,
        needs: Needs,
        own: Counts,
        before: Said | None = None,
    ) -> Step:
        """The step, once ranks have told one another their counts, and what they need of each other's micro-batches;
        `before` is what they said of larger micro-batches, where they need not talk again."""
        parts, sync = [], RankSync(part=batch)
        with contextlib.nullcontext() if before else sync.local():
            parts = _own_parts(batch, limits, needs)
        said = before.of_smaller(parts, limits) if before else agree(own, parts, batch, models, failed=sync.failed)
        if said.failed:
            sync.meet(models.device)
        parts, over, acts = _acts(batch, parts, limits, needs, said, models.device)
        ahead = needs.stages > 1 or said.even(needs) or any(len(part.pieces) > 1 for part in parts)
        plan = StepPlan(limits, tuple(parts), tuple(acts), over, said.counts, said.ranks, reference_ahead=ahead)
        return cls(models, batch, objective, plan, needs, said)

    def within(self, limits: Limits) -> Step:
        """The step within a smaller token budget. Ranks that don't wait for one another within a step need not talk
        again."""
        models, batch, objective = self.models, self.batch, self.objective
        needs = replace(self.needs, why_whole_rows=models.why_whole_rows(objective, batch, limits.tokens))
        before = self.said if needs.meet == "never" else None
        return self._agreed(models, batch, objective, limits, needs, self.said.own, before)

    def run(self, backward: Backward, totals: Totals | None = None) -> Tensor:
        """Adds the gradients; returns and raises as `train_step`."""
        models, plan, batch = self.models, self.plan, self.batch
        device, acts, loss = models.device, plan.acts, torch.zeros(())
        totals = totals if totals is not None and models.leads else Totals()
        sync, execution = RankSync("reference", part=batch, device=device), None
        waited_for = models.waited_for or (backward.exchange is None and plan.ranks > 1)
        with sync.local(waited_for=waited_for):
            given = plan.counts, plan.ranks, backward.accumulate, backward.grad_scale, totals
            execution = Execution(plan, self._cut(), losses_of(self.objective, models, *given), sync, totals)
        if until := plan.until_joined:
            with sync.local(waited_for=models.waited_for):
                if execution is not None:
                    execution.score(acts[: until - 1], backward)
            sync.meet(device)
            assert execution is not None, "a rank that failed has left"
            execution.score(acts[until - 1 : until], backward)
            acts = acts[until:]
        with sync.local(waited_for=waited_for):
            if execution is not None:
                run = run_through_stages if models.stages > 1 else Execution.run
                run(execution, acts, backward)
                loss = execution.loss
        _exchange(loss, backward, sync, device)
        if not batch.stands_in:
            totals.count(batch)
        return loss

    def _cut(self) -> list[Part]:
        """The micro-batches of the plan, and an empty one after them where it has acts of that."""
        plan, batch, device = self.plan, self.batch, self.models.device
        own = isinstance(self.objective, OwnLoss)  # its caller tells rows apart
        parts = cut(batch, plan.micro_batches, device, share=not own)
        if plan.idles or self.models.stages > 1:  # a schedule has as many as there are stages
            parts.append(idle_part(batch, plan.limits.tokens, device))
        if plan.reference_ahead:
            with torch.no_grad():
                parts = with_reference(self.models, parts, batch, self.objective, plan.limits)
        return parts


@dataclass(frozen=True)
class Said:
    """What all ranks said of a step."""

    own: Counts
    """What this rank counted; likewise `counts`, added up over ranks."""
    counts: Counts
    ranks: int
    """Those with rows of their own; ranks that hold the same rows are one."""
    parts: int
    """The most micro-batches of a rank; likewise `long`, of its rows in pieces."""
    long: int
    heaviest: int
    """The most tokens of a forward; likewise `longest`, of a row."""
    longest: int
    failed: int
    """Whether one of them could not cut its batch."""

    def even(self, needs: Needs) -> bool:
        """Whether all ranks run the same passes in the same order."""
        return self.long > 0 and needs.meet != "never"

    def of_smaller(self, parts: Sequence[MicroBatch], limits: Limits) -> Said:
        """The same, as far as this rank knows, of a batch that it cut to a smaller budget."""
        count, long, heaviest = _sizes(parts)
        return replace(self, parts=count, long=long, heaviest=heaviest if self.ranks == 1 else limits.tokens)


def _sizes(parts: Sequence[MicroBatch]) -> tuple[int, int, int]:
    return len(parts), sum(len(each.pieces) > 1 for each in parts), max((each.heaviest for each in parts), default=0)


def agree(
    counts: Counts, parts: Sequence[MicroBatch], batch: RaggedBatch, models: Models, *, failed: bool = False
) -> Said:
    """What all ranks know, from what each of them knows of its own batch, in one exchange.

    Args:
        parts: micro-batches of this rank.
        failed: whether this rank could not cut its batch.
    """
    sizes = *_sizes(parts), max(batch.row_tokens), int(failed)
    if not distributed():
        return Said(counts, counts, 1, *sizes)
    mine = torch.tensor([*counts.values(), *sizes], dtype=torch.float64, device=float64_device(models.device))
    everyones = gathered(mine).view(-1, len(mine))
    totals = (everyones.sum(0) / models.copies).tolist()
    most = everyones.amax(0).long().tolist()[len(counts) :]
    return Said(counts, dict(zip(counts, totals, strict=False)), models.ranks, *most)


def needs_of(models: Models, batch: RaggedBatch, objective: Objective, limits: Limits, backward: Backward) -> Needs:
    """What a run asks of a step."""
    meet = "never"
    if models.together:
        meet = "each forward"
    elif backward.exchange is None and models.ranks > 1:
        meet = "each backward"
    why_whole_rows = models.why_whole_rows(objective, batch, limits.tokens)
    return Needs(objective.over, len(objective.terms), why_whole_rows, meet, models.stages, models.pairs)


def _own_parts(batch: RaggedBatch, limits: Limits, needs: Needs, least: int = 1) -> list[MicroBatch]:
    """The micro-batches of this rank; none where its rows stand in."""
    why, pairs = needs.why_whole_rows, needs.pairs
    parts = cut_rows(batch.segments, limits, least=least, why_whole_rows=why, pairs=pairs)
    return [] if batch.stands_in else parts


def _acts(
    batch: RaggedBatch, parts: list[MicroBatch], limits: Limits, needs: Needs, said: Said, device: torch.device
) -> tuple[list[MicroBatch], str, list[Act]]:
    """The micro-batches of this rank in their order, what its loss is over, and what it runs."""
    if said.even(needs):
        parts = pieces_first(parts)
        everyones = _summaries(Summary.of(parts, needs), said.long, device)
        return parts, needs.loss_over, even_acts(parts, needs, everyones)
    least = needs.stages if needs.meet == "never" else max(said.parts, 1)
    if len(parts) < least:
        parts = _own_parts(batch, limits, needs, least)
    if needs.loss_over == "step" and said.ranks == 1 and len(parts) == 1:  # known after its own forward
        needs = replace(needs, loss_over="row")
    return parts, needs.loss_over, local_acts(parts, needs, 1 if needs.meet == "never" else least)


def _summaries(own: Summary, long: int, device: torch.device) -> list[Summary]:
    """Those of all ranks, which have at most so many rows in pieces each."""
    passes = [*own.long, *[Passes(0, 0)] * (long - len(own.long))]
    mine = torch.tensor([*(number for each in passes for number in each), own.short], device=device)
    everyones = gathered(mine).view(-1, len(mine)).tolist()
    return [
        Summary(tuple(Passes(*each[n : n + 2]) for n in range(0, 2 * long, 2) if each[n + 1]), each[-1])
        for each in everyones
    ]


def _synced_baseline(
    models: Models, batch: RaggedBatch, objective: Objective, limits: Limits
) -> tuple[RaggedBatch, Counts]:
    if objective.baseline is None:
        return batch, {}
    found: tuple[RaggedBatch, Counts] = (batch, {})
    sync = RankSync("baseline", part=batch, device=models.device)
    with sync.local(waited_for=models.waited_for):
        found = with_baseline(models, batch, objective, limits)
    sync.meet(models.device)
    return found


def _exchange(loss: Tensor, backward: Backward, sync: RankSync, device: torch.device) -> None:
    """Brings the gradients of all ranks together, if all of them came through."""
    end = _nothing
    with sync.local():
        if backward.finite and not sync.failed:
            check_finite(loss)
        if backward.exchange is not None and not sync.failed:
            sync.phase = "exchange"
            end = backward.exchange()
    if sync.failed:
        backward.forgo()
    sync.meet(device)
    end()


def _nothing() -> None:
    """What is exchanged where nothing is."""
