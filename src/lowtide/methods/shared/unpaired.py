"""What KTO and BCO share: rows of one completion each, desirable or not; their options, objective and metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.engine.heads.head import Stats
from lowtide.methods.method import RowObjective
from lowtide.methods.shared.completions import completion_sums, in_completion
from lowtide.methods.shared.options import CompletionOptions, ReferenceOptions, VisionOptions, zeros
from lowtide.objectives.kto import Unpaired
from lowtide.objectives.outcome import Counts, Mean, Outcome
from lowtide.ops.logits.logit_rows import Want
from lowtide.option import NOT_NEGATIVE, option
from lowtide.ragged import RaggedBatch

LABEL = "label"
"""Row value: whether a completion is desirable."""


@dataclass(kw_only=True)
class UnpairedOptions(CompletionOptions, ReferenceOptions, VisionOptions):
    """Of the methods over single completions, under TRL's names and with its defaults."""

    beta: float = option(0.1, "How closely the policy keeps to the reference.", NOT_NEGATIVE)
    desirable_weight: float = option(1.0, "Weight of the losses of desirable rows.", NOT_NEGATIVE)
    undesirable_weight: float = option(1.0, "Weight of the losses of undesirable rows.", NOT_NEGATIVE)

    def without_gradient(self) -> list[set[str]]:
        """As `TrainingConfig.without_gradient`: the losses of desirable rows, and those of the others."""
        return [zeros(self, "beta", "desirable_weight"), zeros(self, "beta", "undesirable_weight")]

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out."""
        self.check_reference()
        self.check_turns()


def read_unpaired(batch: RaggedBatch, stats: Stats, reference: Float[Tensor, " scores"] | None) -> Unpaired:
    """Sums over the completion of each row."""
    assert reference is not None
    logprobs = stats["logprobs"]
    counted = in_completion(batch, logprobs)
    policy, referred = (completion_sums(values * counted, batch)[:, 0] for values in (logprobs, reference))
    return Unpaired(policy, referred, batch.row_values[LABEL].bool())


def row_counts(batch: RaggedBatch) -> Counts:
    """The rows of a batch."""
    return {"rows": batch.rows}


def row_weights(rows: Unpaired, options: UnpairedOptions) -> Float[Tensor, " rows"]:
    """The weight of each row's loss."""
    weights = torch.where(rows.desirable, options.desirable_weight, options.undesirable_weight)
    return weights.to(rows.policy.dtype)


def unpaired_objective(
    loss: Callable[..., Outcome], options: UnpairedOptions, aux_coefficient: float, **more: Any
) -> RowObjective:
    """The objective of a loss over single completions.

    Args:
        loss: called with `Unpaired`, the counts of `row_counts` and `options`.
        more: further fields of `RowObjective`.
    """
    return RowObjective(
        read=read_unpaired,
        loss=functools.partial(loss, options=options),
        counts=row_counts,
        want=Want(entropies=options.token_metrics),
        aux_coefficient=aux_coefficient,
        needs_reference=True,
        **more,
    )


def unpaired_metrics(rows: Unpaired, beta: float) -> Mapping[str, Mean]:
    """The metrics of desirable (chosen) and undesirable (rejected) rows, under TRL's names."""
    means = {}
    for name, these in (("chosen", rows.desirable), ("rejected", ~rows.desirable)):
        count = these.sum()
        means[f"rewards/{name}"] = Mean((beta * rows.ratio.detach() * these).sum(), count)
        means[f"logps/{name}"] = Mean((rows.policy.detach() * these).sum(), count)
    return means


def with_margins(metrics: Mapping[str, float]) -> dict[str, float]:
    """The margin between the rewards of desirable and undesirable rows, where there were both."""
    if "rewards/chosen" not in metrics or "rewards/rejected" not in metrics:
        return {}
    return {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}
