"""What methods share whose policy writes: how a batch of completions is read into what their losses need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.data.batches.values import CORRECTION, KEPT, LOG_CORRECTION, OLD, SAMPLED, TOKEN_ADVANTAGE, WINDOW_TOKENS
from lowtide.engine.heads.head import Stats
from lowtide.methods.shared.completions import row_sums
from lowtide.objectives.outcome import Counts
from lowtide.objectives.policy_gradient import Written
from lowtide.ragged import WEIGHT, RaggedBatch


def read_written(batch: RaggedBatch, stats: Stats, reference: Float[Tensor, " scores"] | None) -> Written:
    """The tokens of a batch whose rows are completions."""
    completion = batch.row[batch.score_segment]
    values = batch.score_values
    logprobs = stats["logprobs"]
    old = values.get(OLD, logprobs.detach())
    return Written(
        logprobs=logprobs,
        old=old,
        advantages=values[TOKEN_ADVANTAGE].to(old.dtype),
        completion=completion,
        lengths=row_sums(torch.ones_like(logprobs.detach()), batch),
        window_tokens=batch.row_values[WINDOW_TOKENS].to(old.dtype)[completion],
        sampled=values.get(SAMPLED, old),
        reference=reference,
        entropies=stats.get("entropies"),
        kept=values.get(KEPT),
        correction=values.get(CORRECTION),
        log_correction=batch.row_values.get(LOG_CORRECTION),
    )


@dataclass(frozen=True)
class Sampled:
    """What is known of tokens that were written and that a teacher has read; log-probabilities in nats, at the
    temperature of sampling, without gradient but for those of the policy that is trained."""

    logprobs: Float[Tensor, " scores"]
    """Of the policy that is trained."""
    teacher: Float[Tensor, " scores"]
    completion: Int[Tensor, " scores"]
    """The completion that a token is of; those of one stand together, in their order."""
    old: Float[Tensor, " scores"] | None = None
    """Of the policy that wrote; None where that is the one that is trained."""
    weight: Float[Tensor, " scores"] | None = None
    """What each token counts; None for 1."""


def read_sampled(batch: RaggedBatch, stats: Stats, reference: Float[Tensor, " scores"] | None) -> Sampled:
    """The tokens of a batch whose rows are completions."""
    assert reference is not None, "a teacher is a reference"
    logprobs = stats["logprobs"]
    old, weight = (batch.score_values.get(name) for name in (OLD, WEIGHT))
    return Sampled(
        logprobs,
        reference.to(logprobs.dtype),
        batch.row[batch.score_segment],
        None if old is None else old.to(logprobs.dtype),
        None if weight is None else weight.to(logprobs.dtype),
    )


def completion_counts(batch: RaggedBatch) -> Counts:
    """The completions of a batch, their tokens, and those of them that take part."""
    kept = batch.score_values.get(KEPT)
    return {
        "completions": batch.rows,
        "scores": batch.scores,
        "kept": batch.scores if kept is None else int(kept.sum()),
    }
