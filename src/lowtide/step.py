"""One optimizer step, up to the gradients: count, split, run each micro-batch forward and backward.

A function of model, batch and objective; trainers call it from a subclass of `transformers.Trainer`, the examples
call it bare. The loss is a sum over micro-batches over denominators that are counted before the batch is split and
over all ranks, so that however the batch is cut, the gradients are the same.

An objective that is no such sum (a sort over the batch, a running mean) sees the log-probabilities of the whole batch
first, without gradients; its gradient with respect to them is what the second pass carries into the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.engine.forward import score
from lowtide.engine.head import ScoreOutput, Scores
from lowtide.methods.method import Objective, RowObjective, Scorer, TokenObjective
from lowtide.metrics import Totals, distributed
from lowtide.objectives.outcome import Counts
from lowtide.ragged import RaggedBatch

REFERENCE = "reference"
"""The score value in which a reference's log-probabilities travel, where they were computed before training."""


@dataclass(frozen=True)
class Limits:
    """The strict caps on a micro-batch."""

    rows: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Models:
    """What a step runs: the policy, and the reference if the objective has one."""

    policy: nn.Module
    """Prepared by `engine.forward.install`, wrapped or not."""
    reference: Scorer | None = None
    """Of a micro-batch; not called where the batch knows the reference's log-probabilities already."""
    padding_free: bool = True
    """False runs the padded path."""

    def forward(self, batch: RaggedBatch, scores: Scores) -> ScoreOutput:
        """The policy's forward of one micro-batch; a prompt that several rows share is computed once."""
        joined = batch.share_prefixes()
        return score(
            self.policy,
            joined,
            replace(scores, index=joined.score_index, target=joined.score_target),
            padding_free=self.padding_free,
        )

    def referred(self, batch: RaggedBatch) -> Tensor:
        """[scores]: the reference's log-probabilities of one micro-batch."""
        if REFERENCE in batch.score_values:
            return batch.score_values[REFERENCE]
        assert self.reference is not None, "an objective with a reference needs one"
        return self.reference(batch)


def agree(counts: Counts, pieces: int, device: torch.device) -> tuple[Counts, int, int]:
    """(counts of all ranks added up, micro-batches that each rank runs, ranks), in one exchange."""
    if not distributed():
        return counts, pieces, 1
    mine = torch.tensor([*counts.values(), pieces], dtype=torch.float64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    table = torch.stack(everyones)
    return dict(zip(counts, table[:, :-1].sum(0).tolist(), strict=True)), int(table[:, -1].max()), len(everyones)


def train_step(
    model: nn.Module | Models,
    batch: RaggedBatch,
    objective: Objective,
    *,
    limits: Limits = Limits(),
    accumulate: bool = True,
    backward: Callable[[Tensor], object] = Tensor.backward,
    no_sync: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    totals: Totals | None = None,
) -> Tensor:
    """Adds the gradients of one optimizer step to the model's parameters.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not; or `Models`, where there is a reference.
        batch: the whole local batch of the step; gradient accumulation is folded in.
        limits: of a micro-batch.
        accumulate: gradients of the head go straight to `.grad`; needs a `backward` that does not scale the loss.
        backward: called with the loss of each micro-batch.
        no_sync: entered for all micro-batches but the last, so that ranks exchange gradients once.
        totals: takes in the sums behind the metrics.

    Returns:
        The loss of the step, so scaled that its mean over ranks is the loss of the whole batch.

    Raises:
        ValueError: one row alone is above the token budget.
    """
    models = model if isinstance(model, Models) else Models(model)
    totals = Totals() if totals is None else totals
    batch, known = _baseline(models, batch, objective, limits)
    pieces = len(batch.plan_split(limits.tokens, limits.rows))
    counts, pieces, ranks = agree({**objective.counts(batch), **known}, pieces, batch.token_ids.device)
    parts = batch.split(limits.tokens, limits.rows, pieces=pieces)
    if isinstance(objective, TokenObjective):
        run: _Run = _TokenRun(models, objective, counts, ranks, accumulate)
    elif objective.whole and (len(parts) > 1 or ranks > 1):
        run = _WholeRun(models, objective, counts, ranks, accumulate, totals, parts)
    else:
        run = _RowRun(models, objective, counts, ranks, accumulate, totals)
    losses: list[Tensor] = []
    for number, part in enumerate(parts):
        with contextlib.nullcontext() if number == len(parts) - 1 else no_sync():
            output, loss = run(number, part)
            if output.aux_loss is not None and part.scores:
                loss = loss + objective.aux_coefficient * output.aux_loss * (part.tokens / batch.tokens)
            backward(loss)
        losses.append(loss.detach())
        totals.take_in(output, part)
    return run.reported(torch.stack(losses).sum())


@torch.no_grad()
def evaluate_batch(
    model: nn.Module | Models,
    batch: RaggedBatch,
    objective: Objective,
    totals: Totals,
    *,
    limits: Limits = Limits(),
) -> list[tuple[RaggedBatch, ScoreOutput]]:
    """Adds the loss sum and the metrics of a batch to `totals`; no logits, and nothing is kept but what is returned."""
    models = model if isinstance(model, Models) else Models(model)
    batch, known = _baseline(models, batch, objective, limits)
    counts = {**objective.counts(batch), **known}
    results, rows = [], []
    for part in batch.split(limits.tokens, limits.rows):
        output = models.forward(part, _scores_of(part, objective, accumulate=False))
        totals.take_in(output, part)
        results.append((part, output))
        if isinstance(objective, TokenObjective):
            assert output.loss is not None
            totals.add_mean("loss", output.loss, part.scores)
        else:
            rows.append(_read(models, objective, part, output))
    if isinstance(objective, RowObjective):
        outcome = objective.loss(join_rows(rows), counts)
        totals.add_mean("loss", outcome.loss * batch.rows, batch.rows)
        totals.take_outcome(outcome)
    return results


# -- how the micro-batches of one step are run ----------------------------------------------------------------------


@dataclass
class _Run:
    """From a micro-batch to its output and its loss."""

    models: Models
    objective: Any
    counts: Counts
    ranks: int
    accumulate: bool

    def __call__(self, number: int, part: RaggedBatch) -> tuple[ScoreOutput, Tensor]:
        raise NotImplementedError

    def reported(self, loss: Tensor) -> Tensor:
        """The step's loss, from the sum of the losses that went backward."""
        return loss


@dataclass
class _TokenRun(_Run):
    """The loss is known score by score, and formed in forward."""

    def __call__(self, number: int, part: RaggedBatch) -> tuple[ScoreOutput, Tensor]:
        factor = self.ranks / max(self.counts["scores"], 1)
        output = self.models.forward(part, _scores_of(part, self.objective, self.accumulate, factor))
        assert output.loss is not None
        return output, output.loss


@dataclass
class _RowRun(_Run):
    """The loss is a sum over rows."""

    totals: Totals

    def __call__(self, number: int, part: RaggedBatch) -> tuple[ScoreOutput, Tensor]:
        output = self.models.forward(part, _scores_of(part, self.objective, self.accumulate))
        if part.scores == 0:  # it keeps other ranks company
            return output, output.logprobs.sum()
        outcome = self.objective.loss(_read(self.models, self.objective, part, output), self.counts)
        self.totals.take_outcome(outcome)
        return output, outcome.loss * self.ranks


@dataclass
class _WholeRun(_Run):
    """The loss is of the whole batch over all ranks: a first pass gives its gradient at each log-probability."""

    totals: Totals
    parts: Sequence[RaggedBatch]

    def __post_init__(self) -> None:
        device = self.parts[0].token_ids.device
        self.random: list[list[Tensor]] = []
        leaves, rows = [], []
        for part in self.parts:
            self.random.append(_random_state(device))
            if part.scores == 0:
                continue
            with torch.no_grad():
                output = self.models.forward(part, _scores_of(part, self.objective, accumulate=False))
            output.logprobs = output.logprobs.requires_grad_()
            leaves.append(output.logprobs)
            rows.append(_read(self.models, self.objective, part, output))
        outcome = self.objective.loss(join_rows(gathered_rows(join_rows(rows))), self.counts)
        self.slopes = iter(torch.autograd.grad(outcome.loss, leaves))
        self.loss = outcome.loss.detach()
        self.totals.take_outcome(outcome)

    def __call__(self, number: int, part: RaggedBatch) -> tuple[ScoreOutput, Tensor]:
        _set_random_state(self.random[number])  # the dropout of the first pass
        output = self.models.forward(part, _scores_of(part, self.objective, self.accumulate))
        slope = next(self.slopes) if part.scores else 0.0
        return output, (output.logprobs * slope).sum() * self.ranks

    def reported(self, loss: Tensor) -> Tensor:
        return self.loss


def _scores_of(part: RaggedBatch, objective: Objective, accumulate: bool, factor: float = 1.0) -> Scores:
    return Scores(
        part.score_index,
        part.score_target,
        objective.want,
        objective.loss if isinstance(objective, TokenObjective) else None,
        factor,
        accumulate=accumulate,
        aux_loss=objective.aux_coefficient != 0,
    )


def _read(models: Models, objective: RowObjective, part: RaggedBatch, output: ScoreOutput) -> Any:
    referred = models.referred(part) if objective.needs_reference else None
    return objective.read(part, output.stats, referred)


@torch.no_grad()
def _baseline(models: Models, batch: RaggedBatch, objective: Objective, limits: Limits) -> tuple[RaggedBatch, Counts]:
    """The batch to train on, and the statistics of the whole batch that the objective computes before."""
    if isinstance(objective, TokenObjective) or objective.baseline is None:
        return batch, {}

    def policy(whole: RaggedBatch) -> Tensor:
        return score_in_parts(
            whole, limits, lambda part: models.forward(part, Scores(part.score_index, part.score_target)).logprobs
        )

    def reference(whole: RaggedBatch) -> Tensor:
        return score_in_parts(whole, limits, models.referred)

    return objective.baseline(batch, policy, reference)


def score_in_parts(batch: RaggedBatch, limits: Limits, scorer: Scorer) -> Tensor:
    """[scores] of a batch, from micro-batches within the limits."""
    groups = batch.plan_split(limits.tokens, limits.rows)
    found = torch.empty(batch.scores, device=batch.token_ids.device)
    spans = [(part.score_start, part.score_stop) for part in batch.segments]
    for group in groups:
        chosen = set(group)
        part = batch if len(groups) == 1 else batch.select_rows(group)
        kept = [spans[n] for n, segment in enumerate(batch.segments) if segment.row in chosen]
        place = torch.cat([torch.arange(start, stop) for start, stop in kept])
        found[place.to(found.device)] = scorer(part).to(found.dtype)
    return found


# -- statistics of rows, joined -------------------------------------------------------------------------------------


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


def gathered_rows(rows: Any) -> list[Any]:
    """Statistics of this rank's rows, with gradients, and those of the other ranks, in the order of ranks."""
    if not distributed():
        return [rows]
    detached = {each.name: getattr(rows, each.name) for each in fields(rows)}
    mine = {name: None if value is None else value.detach().cpu() for name, value in detached.items()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    device = next(value.device for value in detached.values() if value is not None)
    others = [
        type(rows)(**{name: None if value is None else value.to(device) for name, value in each.items()})
        for each in everyones
    ]
    return [rows if rank == dist.get_rank() else each for rank, each in enumerate(others)]


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
