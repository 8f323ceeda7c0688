"""Forwards without gradients: an evaluation's, a reference's, and those of statistics that a loss needs first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowtide.data.batches.values import REFERENCE, TEACHER
from lowtide.engine.heads.head import ScoreOutput, Scores
from lowtide.methods.method import Objective, RowObjective, Scorer, TokenObjective
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import worst_of_ranks
from lowtide.step.cut import Part, cut, idle_part
from lowtide.step.losses import join_rows
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step_plan import Limits, MicroBatch, cut_rows


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

    Where forwards are of all ranks together, every rank calls this equally often; one without rows of its own with some
    that stand in, of which nothing is added.
    """
    models, stands_in = Models.of(model), batch.stands_in
    if stands_in:
        if not models.together:
            return []
        batch = idle_part(batch, limits.tokens, models.device).batch
    totals = totals if models.leads else Totals()
    batch, known = with_baseline(models, batch, objective, limits)
    counts = {**objective.counts(batch), **known}
    why = models.why_whole_rows(objective, batch, limits.tokens)
    parts = cut(batch, cut_rows(batch.segments, limits, why_whole_rows=why), models.device)
    if models.teaches_ahead(objective, batch, limits.tokens):
        parts = with_reference(models, parts, batch, objective, limits)
    seen = parts[0].batch  # with the reference's values, if these were asked for ahead
    parts = [] if stands_in else parts
    turns = _turns(models, parts, seen, limits)
    results = _outputs(models, turns, objective)[: len(parts)]
    if not stands_in:
        totals.count(batch)
    for part, output in results:
        totals.take_in(output, part)
        if output.loss is not None and not isinstance(objective, RowObjective):
            totals.add_mean("loss", output.loss, objective.divisor(part))
    if isinstance(objective, RowObjective):
        _add_losses(models, objective, turns, results, counts, totals)
    return results


def _add_losses(
    models: Models,
    objective: RowObjective,
    turns: Sequence[Part],
    results: Sequence[tuple[RaggedBatch, ScoreOutput]],
    counts: Counts,
    totals: Totals,
) -> None:
    """Adds the losses of rows, from what was scored of them."""
    outcomes: list[Outcome] = []
    for term in objective.terms:
        outputs = results if term is objective else _outputs(models, turns, term)[: len(results)]
        if isinstance(term, TokenObjective):
            losses = (output.loss for _, output in outputs)
            outcomes += [Outcome(each / counts["weight"]) for each in losses if each is not None]
            continue
        references = [models.referred(part, term) for part in turns][: len(results)]
        pairs = zip(outputs, references, strict=True)
        rows = [term.read(part, output.stats, reference) for (part, output), reference in pairs]
        outcomes += [term.loss(each, counts) for each in ([join_rows(rows)] if term.whole and rows else rows)]
    if not outcomes:
        return
    over = sum(part.rows for part, _ in results) if objective.mean_over is None else counts[objective.mean_over]
    totals.add_mean("loss", torch.stack([each.loss for each in outcomes]).sum() * over, over)
    for outcome in outcomes:
        totals.take_outcome(outcome)


def _outputs(models: Models, parts: Sequence[Part], objective: Objective) -> list[tuple[RaggedBatch, ScoreOutput]]:
    with models.adapter_of(objective):
        return [(part.batch, models.scored_part(part, objective)) for part in parts]


def _turns(models: Models, parts: Sequence[Part], batch: RaggedBatch, limits: Limits) -> list[Part]:
    """What a pass without gradients runs: the micro-batches and, where forwards are of all ranks together, as many more
    with nothing scored as another rank has more of them; all ranks ask together."""
    if not models.together:
        return [*parts]
    own = sum(len(part.pieces) for part in parts)
    missing = worst_of_ranks(own, models.device) - own
    return [*parts, *[idle_part(batch, limits.tokens, models.device)] * missing] if missing else [*parts]


# -- what is scored before ---------------------------------------------------------------------------------------------


def with_reference(
    models: Models, parts: Sequence[Part], batch: RaggedBatch, objective: Objective, limits: Limits
) -> list[Part]:
    """The micro-batches with the reference's log-probabilities, or the teacher's hidden states, where the policy's
    forwards have no place for those of another model: pieces of a row go on from the policy's keys, and ranks may run
    forwards by a common order.

    Args:
        batch: what the micro-batches are of.
    """
    name = TEACHER if objective.taught else REFERENCE if objective.needs_reference else None
    if name is None or name in batch.score_values:
        return [*parts]
    scorer = models.placed_states if objective.taught else models.reference
    assert scorer is not None, "an objective with a reference needs one"
    found = [models.score(part, scorer) for part in _turns(models, parts, batch, limits)]
    return [part.with_values(name, values) for part, values in zip(parts, found, strict=False)]


@torch.no_grad()
def with_baseline(
    models: Models, batch: RaggedBatch, objective: Objective, limits: Limits
) -> tuple[RaggedBatch, Counts]:
    """The batch to train on, and the statistics of the whole batch that the objective computes before."""
    if objective.baseline is None:
        return batch, {}
    why = models.why_whole_rows(objective, batch, limits.tokens)

    def policy(part: RaggedBatch) -> Tensor:
        temperature = objective.temperature
        return models.forward(part, Scores(part.score_index, part.score_target, temperature=temperature)).scored

    def reference(part: RaggedBatch) -> Tensor:
        referred = models.referred(Part.of(part), objective)
        assert referred is not None or part.scores == 0, "a baseline compares with the reference"
        return torch.zeros(0, device=part.token_ids.device) if referred is None else referred

    def in_parts(scorer: Scorer) -> Scorer:
        return lambda whole: score_in_parts(models, whole, limits, scorer, why_whole_rows=why)

    return objective.baseline(batch, in_parts(policy), in_parts(reference))


def score_in_parts(
    models: Models, batch: RaggedBatch, limits: Limits, scorer: Scorer, *, why_whole_rows: str | None = None
) -> Tensor:
    """[scores, ..] of a batch, from micro-batches within the limits.

    Args:
        models: where the scorer runs, and whether its forwards are of all ranks together, which call this equally
            often.
        why_whole_rows: what keeps rows above the token budget from being run in pieces, as a clause or "".

    Raises:
        ValueError: a row is above the token budget, and not run in pieces.
    """
    plan = cut_rows(batch.segments, limits, why_whole_rows=why_whole_rows)
    turns = _turns(models, cut(batch, plan, models.device), batch, limits)
    found = [models.score(part, scorer) for part in turns][: len(plan)]
    return found[0] if len(found) == 1 else _in_order(batch, plan, torch.cat(found))


def _in_order(batch: RaggedBatch, plan: Sequence[MicroBatch], values: Tensor) -> Tensor:
    """[scores, ..] of a batch in their order, from those of its micro-batches."""
    spans = [(batch.segments[of[0]].score_start, batch.segments[of[-1]].score_stop) for of in batch.row_segments]
    order = torch.cat([torch.arange(*spans[row]) for each in plan for row in each.rows])
    return torch.empty_like(values).index_copy_(0, order.to(values.device), values)
