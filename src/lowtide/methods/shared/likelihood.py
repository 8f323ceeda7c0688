"""The objective of methods that learn the tokens of texts by their likelihood alone."""

from __future__ import annotations

from typing import Any

from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import nll, smoothed_nll
from lowtide.ops.logits.linear_logprobs import ScoreLoss
from lowtide.ops.logits.logit_rows import Want


def likelihood(options: Any, *, plain: ScoreLoss = nll, aux_coefficient: float = 0.0) -> TokenObjective:
    """The negative log-likelihood of the scored tokens, smoothed where that is asked for, and what the metrics need to
    know of each.

    Args:
        plain: the loss where no smoothing is asked for.
    """
    smoothing = options.label_smoothing_factor
    loss = smoothed_nll(smoothing) if smoothing else plain
    want = Want(entropies=options.token_metrics, mean_logprobs=smoothing > 0, top1=options.token_metrics)
    return TokenObjective(loss, want, aux_coefficient)
