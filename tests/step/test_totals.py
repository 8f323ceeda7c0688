"""Metrics of a step: sums, means, smallest and largest values of micro-batches are those of the whole batch."""

from __future__ import annotations

import math

import pytest
import torch

from lowtide.engine.heads.head import ScoreOutput
from lowtide.objectives.outcome import Mean, Outcome
from lowtide.ragged import RaggedBatch
from lowtide.step.metrics import Totals

CPU = torch.device("cpu")


def batch(*lengths: int) -> RaggedBatch:
    return RaggedBatch.from_segments([[3] * length for length in lengths])


def output(part: RaggedBatch, *, right: int, aux: float) -> ScoreOutput:
    """Of entropies 1, 2, 3 ... and so many right tokens."""
    scores = torch.arange(1.0, part.scores + 1)
    stats = {"logprobs": -scores, "entropies": scores, "top1": scores <= right}
    return ScoreOutput(scores.sum(), stats, torch.tensor(aux))


def test_metrics_of_micro_batches_are_means_over_all_tokens():
    """The first has 2 scores of 3 tokens, the second 8 of 10; one has no score and adds nothing."""
    totals, first, second, empty = Totals(), batch(3), batch(5, 5), batch(1)
    assert (first.scores, second.scores, empty.scores) == (2, 8, 0)
    totals.take_in(output(first, right=2, aux=1.0), first)
    totals.take_in(output(second, right=3, aux=4.0), second)
    totals.take_in(output(empty, right=0, aux=100.0), empty)
    totals.count(first)
    totals.count(second)
    found = totals.read(CPU)
    assert found == pytest.approx(
        {
            "mean_token_accuracy": 5 / 10,
            "entropy": (3 + 36) / 10,
            "aux_loss": (3 * 1.0 + 10 * 4.0) / 13,
            "tokens": 13,
            "scores": 10,
        }
    )


def test_accuracy_is_of_losses_of_tokens():
    """Objectives over rows have one of their own."""
    totals, part = Totals(), batch(4)
    found = output(part, right=1, aux=0.0)
    found.loss = None
    totals.take_in(found, part)
    assert "mean_token_accuracy" not in totals.read(CPU)


def test_outcomes_are_joined_by_what_they_are():
    totals, other = Totals(), Totals()
    inf = torch.tensor(math.inf)
    for held, value, count in ((totals, 2.0, 1), (totals, 4.0, 3), (other, -6.0, 4)):
        one = torch.tensor(value)
        means = {"mean": Mean(one, count), "of nothing": Mean(torch.tensor(0.0), 0)}
        lows, highs = {"low": one, "no low": inf}, {"high": one, "no high": -inf}
        held.take_outcome(Outcome(torch.tensor(0.0), means, lows, highs))
        held.add(sum=value)
    totals.take_over(other)
    assert totals.read(CPU) == {"mean": 0.0, "low": -6.0, "high": 4.0, "sum": 0.0}
    totals.add(sum=torch.tensor(2.5, requires_grad=True))
    assert not totals.sums["sum"].requires_grad
    assert totals.read(CPU)["sum"] == 2.5
