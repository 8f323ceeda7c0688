"""Kahneman-Tversky optimization (arXiv 2402.01306): single completions, desirable or not, against a baseline.

The baseline is the mean log-ratio of mismatched pairs, a prompt with another row's completion. It is a statistic of
the whole batch of an optimizer step, over all ranks, and computed before the batch is split.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.methods.method import Method, RowObjective, Scorer
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.rows import Singles
from lowtide.methods.shared.unpaired import (
    UnpairedOptions,
    row_weights,
    unpaired_metrics,
    unpaired_objective,
    with_margins,
)
from lowtide.objectives.kto import LOSSES, Unpaired
from lowtide.objectives.outcome import Counts, Mean, Outcome
from lowtide.ops.float64 import to_float64
from lowtide.option import PATH, option
from lowtide.ragged import RaggedBatch

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class KTOOptions(UnpairedOptions):
    """The options of Kahneman-Tversky optimization, under TRL's names and with its defaults."""

    train_sampling_strategy: str = option(
        "sequential", "Order of the rows: mismatched completions come from the same batch if it is that of the data."
    )
    loss_type: str = option("kto", "KTO's value against a baseline, or APO's without.", choices=[*LOSSES, PATH])

    def settle(self: Any) -> None:
        """Says that a step of one row has a baseline of one mismatched pair; TRL refuses to train so."""
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.data_ranks
        if LOSSES[self.loss_type].baseline and rows == 1:
            logger.warning(
                "per_device_train_batch_size=1 and gradient_accumulation_steps=1: the baseline of each step is "
                "estimated from one mismatched pair. Raise one of the two; the baseline is the mean over a step"
            )


def loss(rows: Unpaired, counts: Counts, *, options: KTOOptions) -> Outcome:
    """The weighted losses of the rows, over the rows of the whole batch."""
    shift = max(counts["kl"] / counts["kl_rows"], 0.0) if "kl" in counts else 0.0
    losses = LOSSES[options.loss_type].fn(rows.shifted_by(shift), options) * row_weights(rows, options)
    means = {**unpaired_metrics(rows, options.beta), "kl": Mean(torch.tensor(shift), 1.0)}
    return Outcome(losses.sum() / counts["rows"], means)


def baseline(batch: RaggedBatch, policy: Scorer, reference: Scorer) -> tuple[RaggedBatch, Counts]:
    """The rows without their mismatched completions, and the log-ratios of these, added up."""
    strange, own = (batch.without_completion(place) for place in range(2))
    total = to_float64(policy(strange) - reference(strange)).sum()
    return own, {"kl": total.item(), "kl_rows": batch.rows}


def objective(options: KTOOptions, *, aux_coefficient: float = 0.0) -> RowObjective:
    """The loss of the options over single completions."""
    first = baseline if LOSSES[options.loss_type].baseline else None
    return unpaired_objective(loss, options, aux_coefficient, baseline=first)


PAPER = Paper(
    "ethayarajh2024kto",
    "KTO: Model Alignment as Prospect Theoretic Optimization",
    ("Kawin Ethayarajh", "Winnie Xu", "Niklas Muennighoff", "Dan Jurafsky", "Douwe Kiela"),
    2024,
    "2402.01306",
)
METHOD = Method(
    "kto",
    "Kahneman-Tversky optimization",
    KTOOptions,
    Singles(mismatched=lambda options: LOSSES[options.loss_type].baseline),
    objective,
    PAPER,
    derived_metrics=with_margins,
)
