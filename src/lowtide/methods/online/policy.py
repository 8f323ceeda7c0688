"""What GRPO and RLOO share: how a batch of completions is read into what their losses need."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.data.batches.values import ADVANTAGE, CORRECTION, KEPT, LOG_CORRECTION, OLD, SAMPLED, WINDOW_TOKENS
from lowtide.engine.heads.head import Stats
from lowtide.methods.shared.completions import row_sums
from lowtide.objectives.outcome import Counts
from lowtide.objectives.policy_gradient import Written
from lowtide.ragged import RaggedBatch


def read_written(batch: RaggedBatch, stats: Stats, reference: Float[Tensor, " scores"] | None) -> Written:
    """The tokens of a batch whose rows are completions."""
    completion = batch.row[batch.score_segment]
    values = batch.score_values
    logprobs = stats["logprobs"]
    old = values.get(OLD, logprobs.detach())
    return Written(
        logprobs=logprobs,
        old=old,
        advantages=batch.row_values[ADVANTAGE].to(old.dtype)[completion],
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


def completion_counts(batch: RaggedBatch) -> Counts:
    """The completions of a batch, their tokens, and those of them that take part."""
    kept = batch.score_values.get(KEPT)
    return {
        "completions": batch.rows,
        "scores": batch.scores,
        "kept": batch.scores if kept is None else int(kept.sum()),
    }
