"""Binary classifier optimization (arXiv 2404.04656): a logistic classifier whose logit is the implicit reward.

Its shift is the running mean of all rewards seen so far, this batch's among them, so the whole batch has to be seen
before its loss is known. The paper's density ratio for prompts from two distributions is not here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from lowtide.methods.method import Method, RowObjective
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.rows import Singles
from lowtide.methods.shared.unpaired import (
    UnpairedOptions,
    row_weights,
    unpaired_metrics,
    unpaired_objective,
    with_margins,
)
from lowtide.objectives.kto import Unpaired, bco
from lowtide.objectives.outcome import Counts, Mean, Outcome
from lowtide.ops.float64 import to_float64


@dataclass(kw_only=True)
class BCOOptions(UnpairedOptions):
    """The options of binary classifier optimization, under TRL's names and with its defaults."""


@dataclass
class RunningMean:
    """The mean of all that was seen so far."""

    total: float = 0.0
    count: float = 0.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0

    def take_in(self, values: torch.Tensor) -> None:
        self.total += to_float64(values.detach()).sum().item()
        self.count += values.numel()


def loss(rows: Unpaired, counts: Counts, *, options: BCOOptions, running: RunningMean) -> Outcome:
    """The weighted losses of the rows of the whole batch, against the running mean."""
    losses = bco(rows.shifted_by(running.value), options) * row_weights(rows, options)
    means = {**unpaired_metrics(rows, options.beta), "delta": Mean(torch.tensor(running.value), 1.0)}
    return Outcome(losses.sum() / counts["rows"], means)


def objective(options: BCOOptions, *, aux_coefficient: float = 0.0, running: RunningMean | None = None) -> RowObjective:
    """The loss of the options over single completions; `running` is kept by the caller who checkpoints it."""
    running = running or RunningMean()
    with_mean = functools.partial(loss, running=running)

    def observe(rows: Unpaired) -> None:
        running.take_in(options.beta * rows.ratio)

    return unpaired_objective(with_mean, options, aux_coefficient, whole=True, running=running, observe=observe)


PAPER = Paper(
    "jung2024binary",
    "Binary Classifier Optimization for Large Language Model Alignment",
    ("Seungjae Jung", "Gunsoo Han", "Daniel Wontae Nam", "Kyoung-Woon On"),
    2024,
    "2404.04656",
)
METHOD = Method(
    "bco", "binary classifier optimization", BCOOptions, Singles(), objective, PAPER, derived_metrics=with_margins
)
