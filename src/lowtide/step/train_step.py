"""One optimizer step, up to the gradients: count, split, run each micro-batch forward and backward.

A function of model, batch and objective; trainers call it from a subclass of `transformers.Trainer`, the examples
call it bare. The loss is a sum over micro-batches over denominators that are counted before the batch is split and
over all ranks, so that however the batch is cut, the gradients are the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.data.batches.values import REFERENCE, TEACHER
from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.methods.method import Objective, RowObjective, Scorer, TokenObjective
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ops.float64 import float64_device
from lowtide.ops.piece_keys import KeyPlace, OnDevice
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import distributed, worst_of_ranks
from lowtide.step.chains import Chain, detached, in_row_order, joined_output
from lowtide.step.even_turns import EvenTurns, Turn, pieces_first
from lowtide.step.metrics import Totals
from lowtide.step.microbatches import (
    MicrobatchRun,
    Models,
    OwnLoss,
    OwnRun,
    RowRun,
    TokenRun,
    WholeRun,
    join_rows,
    scores_of,
)
from lowtide.step.pieces import LEAST, LongRow, idle_part, in_pieces, is_long
from lowtide.step.pipeline import forward_and_backward
from lowtide.step.rank_sync import RankSync, check_finite

Context = Callable[[], contextlib.AbstractContextManager]

TOKENS = "all_tokens"
"""Of the counts of a step: its tokens, scored or not."""


@dataclass(frozen=True)
class Limits:
    """The strict caps on a micro-batch."""

    rows: int | None = None
    tokens: int | None = None
    place: Callable[[], KeyPlace] = OnDevice
    """Makes the place where the keys wait of a row above `tokens`, which is run in pieces."""


@dataclass(frozen=True)
class BackwardPlan:
    """How a step goes backward, and how it meets the other ranks."""

    accumulate: bool = True
    """Gradients of the head go straight to `.grad`; needs a `backward` that scales the loss by `grad_scale` and nothing
    else."""
    backward: Callable[[Tensor], object] = Tensor.backward
    """Called with the loss of each micro-batch."""
    grad_scale: float = 1.0
    """What `backward` multiplies the loss by, as a loss scaler for float16 does. The head forms its gradients in
    forward, and so much larger, so that they do not underflow before."""
    exchange: Callable[[], Callable[[], None]] | None = None
    """Brings the gradients of all ranks together, or makes ready to, and returns what ends that once all ranks came
    through. Without it a wrapper does in the last backward, where the failure of one rank leaves the others waiting."""
    overlap: Context = contextlib.nullcontext
    """Entered for the last forward and backward of a step, in which gradients may be exchanged as they arrive."""
    forgo: Callable[[], None] = lambda: None
    """Called in place of `exchange` by a rank that failed."""
    no_sync: Context = contextlib.nullcontext
    """A wrapper's: entered for the micro-batches in which it exchanges nothing."""
    around_last: Context = contextlib.nullcontext
    """Entered for the last micro-batch, in whose backward every gradient is complete as it arrives."""
    finite: bool = False
    """Stops at a loss that is no number, before ranks exchange."""
    abandon: Callable[[], None] = lambda: None
    """Puts in order what a step that was left in the middle leaves behind, beside gradients."""


class Agreed(NamedTuple):
    """What all ranks know of a step before it."""

    counts: Counts
    """Of all ranks, added up."""
    pieces: int
    """Micro-batches that each rank runs; 0 where one of them could not cut its batch."""
    ranks: int
    long_rows: bool
    """Whether one of them has a row above the token budget."""


def agree(counts: Counts, pieces: int, device: torch.device, copies: int = 1, *, long_rows: bool = False) -> Agreed:
    """What all ranks know, from what each of them knows of its own batch, in one exchange.

    Args:
        pieces: micro-batches of this rank; 0 if it could not cut its batch.
        copies: so many ranks hold the same rows, and count as one.
        long_rows: whether this rank has a row above the token budget.
    """
    if not distributed():
        return Agreed(counts, pieces, 1, long_rows)
    mine = torch.tensor([*counts.values(), long_rows, pieces], dtype=torch.float64, device=float64_device(device))
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    table = torch.stack(everyones)
    *totals, cutting, _ = (table.sum(0) / copies).tolist()
    each = table[:, -1]
    pieces = int(each.max()) if each.min() else 0
    return Agreed(dict(zip(counts, totals, strict=True)), pieces, len(everyones) // copies, cutting > 0)


def train_step(
    model: nn.Module | Models,
    batch: RaggedBatch,
    objective: Objective | OwnLoss,
    *,
    limits: Limits = Limits(),
    plan: BackwardPlan = BackwardPlan(),
    totals: Totals | None = None,
) -> Tensor:
    """Adds the gradients of one optimizer step to the model's parameters.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not; or `Models`, where there is a reference.
        batch: the whole local batch of the step; gradient accumulation is folded in.
        limits: of a micro-batch.
        plan: how it goes backward, and meets other ranks.
        totals: takes in the sums behind the metrics.

    Returns:
        The loss of the step, so scaled that its mean over ranks is the loss of the whole batch.

    Raises:
        ValueError: a row is above the token budget and cannot be run in pieces.
        OutOfMemory: this rank or another ran out of memory; gradients are half formed, nothing else has changed.
        NotFinite: the loss of this rank or of another is not finite; likewise.
    """
    models = model if isinstance(model, Models) else Models(model, place=limits.place)
    totals = totals if totals is not None and models.leads else Totals()
    stands_in, batch = batch.stands_in, idle_part(batch, limits.tokens) if batch.stands_in else batch
    sync = RankSync("baseline", part=batch)
    batch, known = _synced_baseline(sync, models, batch, objective, limits)
    device = batch.token_ids.device
    pieces = 0
    with sync.local():
        pieces = max(len(groups_of(models, batch, objective, limits)), models.stages)
    is_cut = limits.tokens is not None and max(batch.row_tokens, default=0) > limits.tokens
    own_counts = _own_counts(objective, batch, known, stands_in)
    counts, pieces, ranks, some_cut = agree(own_counts, pieces, device, models.copies, long_rows=is_cut)
    if not pieces:
        sync.meet(device)
    even = some_cut and (models.together or (plan.exchange is None and ranks > 1))  # as each backward meets others'
    in_order = even or models.stages > 1
    if in_order or (is_cut and objective.taught):
        with sync.local(waited_for=in_order or models.waited_for):
            batch = _with_reference(models, batch, objective, limits)
    parts, own = _micro_batches(batch, limits, pieces, even=even, stands_in=stands_in)
    idle = idle_part(batch, limits.tokens) if in_order else batch
    first = _turns(models, parts, idle) if even else parts
    runs = _runs_of(models, objective, (counts, ranks, plan.accumulate), plan.grad_scale, own, first, sync, totals)
    runs[0].begin()
    loss = torch.zeros(())
    with sync.local(waited_for=models.waited_for or (plan.exchange is None and ranks > 1)):
        if models.stages > 1:
            loss = _through_stages(runs, parts, idle, plan, sync, totals)
        else:
            passes = _passes_of(runs, parts, idle, even)
            loss = _forward_and_backward(runs[0], own, passes, plan, sync, totals)
    _exchange(loss, plan, sync, device)
    (Totals() if stands_in else totals).count(batch)
    return loss


def _own_counts(objective: Objective | OwnLoss, batch: RaggedBatch, known: Counts, stands_in: bool) -> Counts:
    """What this rank adds to the counts of a step: nothing where its rows stand in."""
    own = {**objective.counts(batch), **known, TOKENS: batch.tokens}
    return dict.fromkeys(own, 0) if stands_in else own


def _micro_batches(
    batch: RaggedBatch, limits: Limits, pieces: int, *, even: bool, stands_in: bool
) -> tuple[list[RaggedBatch | LongRow], int]:
    """The micro-batches of this rank, and how many of them have rows of its own.

    Args:
        pieces: so many at least.
        even: rows in pieces go first, as on other ranks, which are waited for then; there need be no more.
        stands_in: none of the rows is this rank's own.
    """
    least = 1 if even else pieces
    parts = parts_of(batch, limits, least)
    own = 0 if stands_in else len(batch.plan_split(limits.tokens, limits.rows, pieces=least, long_rows=True))
    return pieces_first(parts) if even else parts, own


def _through_stages(
    runs: Sequence[MicrobatchRun],
    parts: Sequence[RaggedBatch | LongRow],
    idle: RaggedBatch,
    plan: BackwardPlan,
    sync: RankSync,
    totals: Totals,
) -> Tensor:
    """The loss of a batch, one run after the other, each of which takes all micro-batches through the pipeline; metrics
    are those of the first.

    Args:
        idle: an empty micro-batch.
    """
    losses = []
    for run in runs:
        with run.models.adapter_of(run.objective):
            taking = totals if run is runs[0] else Totals()
            losses.append(forward_and_backward(run, parts, idle, plan.backward, sync, taking))
    return torch.stack(losses).sum()


def _runs_of(
    models: Models,
    objective: Objective | OwnLoss,
    how: tuple[Counts, int, bool],
    grad_scale: float,
    own: int,
    parts: Sequence[RaggedBatch | LongRow],
    sync: RankSync,
    totals: Totals,
) -> Sequence[MicrobatchRun]:
    """How the micro-batches of a step are run, for each term of the loss.

    Args:
        how: counts of all ranks, ranks, and whether gradients of the head go straight to `.grad`.
        own: micro-batches with rows of this rank.
        parts: what a first pass over all of them runs.
    """
    ranks = how[1]
    if isinstance(objective, TokenObjective):
        return [TokenRun(models, objective, *how, grad_scale)]
    if isinstance(objective, OwnLoss):
        return [OwnRun(models, objective, *how, totals)]
    if objective.whole and (len(parts) > 1 or ranks > 1):
        first = parts[0].batch if isinstance(parts[0], LongRow) else parts[0]
        return [WholeRun(models, objective, *how, totals, parts, sync, first.token_ids.device)]
    return [RowRun(models, term, *how, totals, own) for term in objective.terms]


def _exchange(loss: Tensor, plan: BackwardPlan, sync: RankSync, device: torch.device) -> None:
    """Brings the gradients of all ranks together, if all of them came through."""
    end = _nothing
    with sync.local():
        if plan.finite and not sync.failed:
            check_finite(loss)
        if plan.exchange is not None and not sync.failed:
            sync.phase = "exchange"
            end = plan.exchange()
    if sync.failed:
        plan.forgo()
    sync.meet(device)
    end()


def _forward_and_backward(
    first: MicrobatchRun,
    own: int,
    passes: Sequence[tuple[Sequence[MicrobatchRun], Turn]],
    plan: BackwardPlan,
    sync: RankSync,
    totals: Totals,
) -> Tensor:
    """The loss of a batch, from its micro-batches one after the other, and of each one loss after the other.

    Metrics are those of the `first` loss. The balancing loss of experts is weighed by tokens: of the micro-batches with
    rows of this rank, which are `own`, by those of a rank on average, since ranks are averaged.

    A function of its own, so that after a failure its variables, and with them the graph of a micro-batch, can be
    dropped before anything else is done.
    """
    losses: list[Tensor] = []
    for place, (runs, (number, part, idle)) in enumerate(passes):
        last = place == len(passes) - 1
        if idle is not None:
            _idle_forwards(runs[0], idle.batch, idle.count, plan)
        if part is None:
            continue
        if isinstance(part, LongRow):
            for run in runs:
                taking = totals if run is first else Totals()
                losses.append(_row_in_pieces(run, number, part, plan, sync, taking, last and run is runs[-1]))
            continue
        sync.micro_batch, sync.part = number, part
        quiet = contextlib.nullcontext() if last and plan.exchange is None else plan.no_sync()
        with quiet, plan.around_last() if last else contextlib.nullcontext():
            for run in runs:
                sync.phase = "forward"
                overlap = plan.overlap() if last and run is runs[-1] else contextlib.nullcontext()
                with overlap, run.models.adapter_of(run.objective):
                    output, loss = run(number, part)
                    if output.aux_loss is not None and number < own:
                        share = part.tokens * first.ranks / first.counts[TOKENS]
                        loss = loss + run.objective.aux_coefficient * output.aux_loss * share
                    sync.phase = "backward"
                    plan.backward(loss)
                losses.append(loss.detach())
                if run is first:
                    totals.take_in(output, part)
    return first.reported(torch.stack(losses).sum())


def _passes_of(
    runs: Sequence[MicrobatchRun], parts: Sequence[RaggedBatch | LongRow], idle: RaggedBatch, even: bool
) -> list[tuple[Sequence[MicrobatchRun], Turn]]:
    """The parts in their order, each with all runs; with `even` in that of all ranks and one run after the other over
    all of them, so that each pass meets its like.

    Args:
        idle: an empty micro-batch.
    """
    if not even:
        return [(runs, Turn(number, part)) for number, part in enumerate(parts)]
    agreed = EvenTurns.agreed(parts, runs[0].first_forwards, idle.token_ids.device)
    turns = agreed.turns(parts, runs[0].first_forwards, idle)
    return [([run], turn) for run in runs for turn in turns]


@torch.no_grad()
def _idle_forwards(run: MicrobatchRun, idle: RaggedBatch, count: int, plan: BackwardPlan) -> None:
    """Empty forwards, beside those of the first pass of other ranks' rows."""
    with run.models.adapter_of(run.objective), plan.no_sync():
        for _ in range(count):
            run.first_forward(idle)


def _row_in_pieces(
    run: MicrobatchRun, number: int, row: LongRow, plan: BackwardPlan, sync: RankSync, totals: Totals, last: bool
) -> Tensor:
    """The loss of a row that is run in pieces, each forward and backward after all that go on from it.

    Args:
        totals: takes in what the row adds to the metrics.
        last: nothing goes backward after it.
    """
    chain, outputs, losses = Chain(row, run.models.place()), {}, []
    sync.micro_batch, sync.part, sync.phase = number, row.batch, "forward"
    with run.models.adapter_of(run.objective):
        with plan.no_sync():
            slopes, loss = run.slopes_of(number, chain)
        for piece in chain.last_pass():
            final = last and piece == 0
            quiet = contextlib.nullcontext() if final and plan.exchange is None else plan.no_sync()
            with quiet, plan.around_last() if final else contextlib.nullcontext():
                sync.part, sync.phase = chain.row.pieces[piece].batch, "forward"
                with plan.overlap() if final else contextlib.nullcontext():
                    output = run.piece_forward(number, chain, piece)
                    own = run.piece_loss(number, chain, piece, slopes, output)
                    outputs[piece] = output = detached(output)
                    sync.phase = "backward"
                    plan.backward(own)
            losses.append(own.detach())
            del own  # and with it what is left of the graph
    totals.take_in(joined_output(row, [outputs[piece] for piece in range(len(row.pieces))]), row.batch)
    return torch.stack(losses).sum() if loss is None else loss


def groups_of(models: Models, batch: RaggedBatch, objective: Objective | OwnLoss, limits: Limits) -> list[list[int]]:
    """The rows of each micro-batch, each above the token budget by itself.

    Raises:
        ValueError: a row is above the token budget and cannot be run in pieces; says why.
    """
    groups = batch.plan_split(limits.tokens, limits.rows, long_rows=True)
    check_long_rows(models, batch, objective, limits)
    return groups


def check_long_rows(models: Models, batch: RaggedBatch, objective: Objective | OwnLoss, limits: Limits) -> None:
    """Refuses rows above the token budget that cannot be run in pieces.

    Raises:
        ValueError: names the longest, and says why.
    """
    if limits.tokens is None or max(batch.row_tokens) <= limits.tokens:
        return
    reason = models.why_not_chains(objective)
    if reason is None and limits.tokens < LEAST:
        reason = f"a piece has at least {LEAST} tokens"
    if reason is not None:
        batch.refuse_long_row(limits.tokens, reason)


def parts_of(batch: RaggedBatch, limits: Limits, pieces: int = 1) -> list[RaggedBatch | LongRow]:
    """The micro-batches of a batch, each row above the token budget in pieces."""
    parts = batch.split(limits.tokens, limits.rows, pieces=pieces, long_rows=True)
    return in_pieces(parts, limits.tokens)


def _nothing() -> None:
    """What is exchanged where nothing is."""


@torch.no_grad()
def evaluate_batch(
    model: nn.Module | Models,
    batch: RaggedBatch,
    objective: Objective,
    totals: Totals,
    *,
    limits: Limits = Limits(),
) -> list[tuple[RaggedBatch, ScoreOutput]]:
    """Adds the loss sum and the metrics of a batch to `totals`; no logits, and nothing is kept but what is returned.

    Where forwards are of all ranks together, every rank calls this, or `accompany`, equally often.
    """
    models = model if isinstance(model, Models) else Models(model, place=limits.place)
    totals = totals if models.leads else Totals()
    batch, known = _baseline(models, batch, objective, limits)
    counts = {**objective.counts(batch), **known}
    check_long_rows(models, batch, objective, limits)
    if models.teaches_ahead(objective, batch, limits.tokens):
        batch = _with_reference(models, batch, objective, limits)
    parts = parts_of(batch, limits)
    turns = _turns(models, parts, idle_part(batch, limits.tokens))
    results = _outputs(models, turns, objective)[: len(parts)]
    totals.count(batch)
    for part, output in results:
        totals.take_in(output, part)
        if isinstance(objective, TokenObjective):
            assert output.loss is not None
            totals.add_mean("loss", output.loss, part.scores)
    if isinstance(objective, RowObjective):
        outcomes: list[Outcome] = []
        for term in objective.terms:
            outputs = results if term is objective else _outputs(models, turns, term)[: len(parts)]
            references = _referred(models, turns, term)[: len(parts)]
            pairs = zip(outputs, references, strict=True)
            rows = [term.read(part, output.stats, reference) for (part, output), reference in pairs]
            outcomes += [term.loss(each, counts) for each in ([join_rows(rows)] if term.whole else rows)]
        over = batch.rows if objective.mean_over is None else counts[objective.mean_over]
        totals.add_mean("loss", torch.stack([each.loss for each in outcomes]).sum() * over, over)
        for outcome in outcomes:
            totals.take_outcome(outcome)
    return results


@torch.no_grad()
def accompany(models: Models, batch: RaggedBatch, objective: Objective, limits: Limits = Limits()) -> None:
    """Takes part in the forwards of an evaluation that other ranks run, where forwards are of all together.

    Args:
        batch: what a row that is not scored is taken from.
    """
    if not models.together:
        return
    idle = idle_part(batch, limits.tokens)
    _baseline(models, idle, objective, limits)
    if models.teaches_ahead(objective, idle, limits.tokens):
        idle = _with_reference(models, idle, objective, limits)
    turns = _turns(models, [], idle)
    for term in objective.terms if isinstance(objective, RowObjective) else [objective]:
        _outputs(models, turns, term)
        if isinstance(term, RowObjective):
            _referred(models, turns, term)


def _turns(models: Models, parts: Sequence[RaggedBatch | LongRow], idle: RaggedBatch) -> list[RaggedBatch | LongRow]:
    """What a pass without gradients runs: the micro-batches and, where forwards are of all ranks together, as many more
    with nothing scored as another rank has more of them."""
    return [*parts, *[idle] * _missing_forwards(parts, idle.token_ids.device)] if models.together else [*parts]


def _missing_forwards(parts: Sequence[RaggedBatch | LongRow], device: torch.device) -> int:
    """How many forwards fewer a pass over some parts takes than that of the rank that has most; all ranks ask
    together."""
    own = sum(len(part.pieces) if isinstance(part, LongRow) else 1 for part in parts)
    return worst_of_ranks(own, device) - own


def _referred(models: Models, turns: Sequence[RaggedBatch | LongRow], objective: RowObjective) -> list[Tensor | None]:
    return [
        models.referred_of_row(part, objective) if isinstance(part, LongRow) else models.referred(part, objective)
        for part in turns
    ]


def _outputs(
    models: Models, parts: Sequence[RaggedBatch | LongRow], objective: Objective
) -> list[tuple[RaggedBatch, ScoreOutput]]:
    def output_of(part: RaggedBatch | LongRow) -> tuple[RaggedBatch, ScoreOutput]:
        if isinstance(part, LongRow):
            return part.batch, models.forward_row(part, objective)
        return part, models.forward(part, scores_of(part, objective, accumulate=False))

    with models.adapter_of(objective):
        return [output_of(part) for part in parts]


def _synced_baseline(
    sync: RankSync, models: Models, batch: RaggedBatch, objective: Objective | OwnLoss, limits: Limits
) -> tuple[RaggedBatch, Counts]:
    if isinstance(objective, TokenObjective | OwnLoss) or objective.baseline is None:
        return batch, {}
    found: tuple[RaggedBatch, Counts] = (batch, {})
    with sync.local(waited_for=models.waited_for):
        found = _baseline(models, batch, objective, limits)
    sync.meet(batch.token_ids.device)
    return found


@torch.no_grad()
def _with_reference(models: Models, batch: RaggedBatch, objective: Objective | OwnLoss, limits: Limits) -> RaggedBatch:
    """The batch with the reference's log-probabilities, or the teacher's hidden states, where the policy's forwards
    have no place for those of another model: pieces of a row go on from the policy's keys, and ranks may run forwards
    by a common order."""
    if objective.taught:
        name, scorer = TEACHER, functools.partial(models.teacher.states, placed=True)
    elif isinstance(objective, RowObjective) and objective.needs_reference:
        name, scorer = REFERENCE, models.reference
    else:
        return batch
    if name in batch.score_values:
        return batch
    assert scorer is not None, "an objective with a reference needs one"
    found = score_in_parts(batch, limits, scorer, together=models.together)
    return replace(batch, score_values={**batch.score_values, name: found})


@torch.no_grad()
def _baseline(
    models: Models, batch: RaggedBatch, objective: Objective | OwnLoss, limits: Limits
) -> tuple[RaggedBatch, Counts]:
    """The batch to train on, and the statistics of the whole batch that the objective computes before."""
    if isinstance(objective, TokenObjective | OwnLoss) or objective.baseline is None:
        return batch, {}
    check_long_rows(models, batch, objective, limits)

    def policy(part: RaggedBatch) -> Tensor:
        temperature = objective.temperature
        return models.forward(part, Scores(part.score_index, part.score_target, temperature=temperature)).scored

    def reference(part: RaggedBatch) -> Tensor:
        referred = models.referred(part, objective)
        assert referred is not None or part.scores == 0, "a baseline compares with the reference"
        return torch.zeros(0, device=part.token_ids.device) if referred is None else referred

    def in_parts(scorer: Scorer) -> Scorer:
        return lambda whole: score_in_parts(whole, limits, scorer, together=models.together)

    return objective.baseline(batch, in_parts(policy), in_parts(reference))


def score_in_parts(
    batch: RaggedBatch, limits: Limits, scorer: Scorer, *, together: bool = False, long_rows: bool = True
) -> Tensor:
    """[scores, ..] of a batch, from micro-batches within the limits.

    Args:
        together: the scorer's forwards are of all ranks together, which call this equally often.
        long_rows: rows above the token budget are run in pieces.

    Raises:
        ValueError: a row is above the token budget, and not run in pieces.
    """
    groups = batch.plan_split(limits.tokens, limits.rows, long_rows=long_rows)
    parts = [batch] if len(groups) == 1 else [batch.select_rows(group) for group in groups]
    most = limits.tokens
    turns = [part if most is None or not is_long(part, most) else LongRow.of(part, most) for part in parts]
    more = _missing_forwards(turns, batch.token_ids.device) if together else 0

    def scored(part: RaggedBatch | LongRow) -> Tensor:
        if isinstance(part, RaggedBatch):
            return scorer(part)
        return in_row_order(part, Chain(part, limits.place()).scores(scorer))

    found = _joined(batch, groups, [scored(part) for part in turns])
    for _ in range(more):
        scorer(idle_part(batch, most))
    return found


def _joined(batch: RaggedBatch, groups: Sequence[list[int]], scored: Sequence[Tensor]) -> Tensor:
    """[scores, ..] of a batch in their order, from those of groups of rows."""
    if len(groups) == 1:
        return scored[0]
    found: Tensor | None = None
    spans = [(part.score_start, part.score_stop) for part in batch.segments]
    for group, values in zip(groups, scored, strict=True):
        chosen = set(group)
        found = values.new_empty(batch.scores, *values.shape[1:]) if found is None else found
        kept = [spans[n] for n, segment in enumerate(batch.segments) if segment.row in chosen]
        place = torch.cat([torch.arange(start, stop) for start, stop in kept])
        found[place.to(found.device)] = values
    assert found is not None
    return found
