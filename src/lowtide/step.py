"""One optimizer step, up to the gradients: count, split, run each micro-batch forward and backward.

A function of model, batch and objective; trainers call it from a subclass of `transformers.Trainer`, the examples
call it bare. The loss is a sum over micro-batches over one denominator, which is counted before the batch is split
and over all ranks, so that however the batch is cut, the gradients are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.engine.forward import score
from lowtide.engine.head import ScoreOutput, Scores
from lowtide.methods import Objective
from lowtide.ragged import RaggedBatch


@dataclass(frozen=True)
class Limits:
    """The strict caps on a micro-batch."""

    rows: int | None = None
    tokens: int | None = None


@dataclass
class Totals:
    """Sums over micro-batches, on the device until somebody reads them."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            value = value.detach().double() if isinstance(value, Tensor) else torch.tensor(float(value)).double()
            held = self.values.get(name)
            self.values[name] = value if held is None else held + value.to(held.device)

    def take_in(self, output: ScoreOutput, batch: RaggedBatch) -> None:
        """What one micro-batch adds to the metrics."""
        self.add(tokens=batch.tokens, scores=batch.scores)
        if output.entropies is not None:
            self.add(entropy=output.entropies.sum())
        if output.top1 is not None:
            self.add(top1=output.top1.sum())
        if output.aux_loss is not None:
            self.add(aux_loss=output.aux_loss * batch.tokens)

    def read(self, device: torch.device) -> dict[str, float]:
        """The sums over all ranks, by name."""
        names = sorted(self.values)
        if not names:
            return {}
        sums = torch.stack([self.values[name].to(device) for name in names]).float()
        if distributed():
            dist.all_reduce(sums)
        return dict(zip(names, sums.tolist(), strict=True))


def distributed() -> bool:
    """Whether several ranks train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(scores: int, pieces: int, device: torch.device) -> tuple[int, int, int]:
    """(scores of all ranks, micro-batches that each rank runs, ranks), in one exchange."""
    if not distributed():
        return scores, pieces, 1
    ranks = dist.get_world_size()
    mine = torch.tensor([scores, pieces], device=device)
    everyones = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyones, mine)
    table = torch.stack(everyones)
    return int(table[:, 0].sum()), int(table[:, 1].max()), ranks


def train_step(
    model: nn.Module,
    batch: RaggedBatch,
    objective: Objective,
    *,
    limits: Limits = Limits(),
    padding_free: bool = True,
    accumulate: bool = True,
    backward: Callable[[Tensor], object] = Tensor.backward,
    no_sync: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    totals: Totals | None = None,
) -> Tensor:
    """Adds the gradients of one optimizer step to the model's parameters.

    Args:
        model: prepared by `engine.forward.install`, wrapped or not.
        batch: the whole local batch of the step; gradient accumulation is folded in.
        limits: of a micro-batch.
        padding_free: False runs the padded path.
        accumulate: gradients of the head go straight to `.grad`; needs a `backward` that does not scale the loss.
        backward: called with the loss of each micro-batch.
        no_sync: entered for all micro-batches but the last, so that ranks exchange gradients once.
        totals: takes in the sums behind the metrics.

    Returns:
        The loss of the step, so scaled that its mean over ranks is the loss of the whole batch.

    Raises:
        ValueError: one row alone is above the token budget.
    """
    pieces = len(batch.plan_split(limits.tokens, limits.rows))
    scores, pieces, ranks = agree(batch.scores, pieces, batch.token_ids.device)
    factor = ranks / max(scores, 1)
    losses: list[Tensor] = []
    parts = batch.split(limits.tokens, limits.rows, pieces=pieces)
    for number, part in enumerate(parts):
        with contextlib.nullcontext() if number == len(parts) - 1 else no_sync():
            output = run(model, part, objective, factor, padding_free=padding_free, accumulate=accumulate)
            loss = output.loss
            assert loss is not None
            if output.aux_loss is not None and part.scores:
                loss = loss + objective.aux_coefficient * output.aux_loss * (part.tokens / batch.tokens)
            backward(loss)
        losses.append(loss.detach())
        if totals is not None:
            totals.take_in(output, part)
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate_batch(
    model: nn.Module,
    batch: RaggedBatch,
    objective: Objective,
    totals: Totals,
    *,
    limits: Limits = Limits(),
    padding_free: bool = True,
) -> list[tuple[RaggedBatch, ScoreOutput]]:
    """Adds the loss sum and the metrics of a batch to `totals`; no logits, and nothing is kept but what is returned."""
    results = []
    for part in batch.split(limits.tokens, limits.rows):
        output = run(model, part, objective, 1.0, padding_free=padding_free, accumulate=False)
        assert output.loss is not None
        totals.add(loss=output.loss)
        totals.take_in(output, part)
        results.append((part, output))
    return results


def run(
    model: nn.Module,
    batch: RaggedBatch,
    objective: Objective,
    factor: float,
    *,
    padding_free: bool,
    accumulate: bool,
) -> ScoreOutput:
    """The forward of one micro-batch, with its loss."""
    scores = Scores(
        batch.score_index,
        batch.score_target,
        objective.want,
        objective.loss,
        factor,
        accumulate=accumulate,
        aux_loss=objective.aux_coefficient != 0,
    )
    return score(model, batch, scores, padding_free=padding_free)
