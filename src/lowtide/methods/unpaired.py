"""What KTO and BCO share: rows of one completion each, desirable or not."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from lowtide.methods.completions import completion_segments, in_completion, segment_sums
from lowtide.objectives.kto import Unpaired
from lowtide.objectives.outcome import Counts, Mean
from lowtide.ops.linear_logprobs import TokenStats
from lowtide.ragged import RaggedBatch

LABEL = "label"
"""Row value: whether a completion is desirable."""


def read_unpaired(batch: RaggedBatch, stats: TokenStats, reference: Float[Tensor, " scores"] | None) -> Unpaired:
    """Sums over the completion of each row."""
    assert reference is not None
    (completions,) = completion_segments(batch, 1)
    counted = in_completion(batch, stats.logprobs)
    policy, referred = (segment_sums(values * counted, batch) for values in (stats.logprobs, reference))
    return Unpaired(policy[completions], referred[completions], batch.row_values[LABEL].bool())


def row_counts(batch: RaggedBatch) -> Counts:
    """The rows of a batch."""
    return {"rows": batch.rows}


def unpaired_metrics(rows: Unpaired, beta: float) -> Mapping[str, Mean]:
    """The metrics of desirable (chosen) and undesirable (rejected) rows, under TRL's names."""
    means = {}
    for name, these in (("chosen", rows.desirable), ("rejected", ~rows.desirable)):
        count = these.sum()
        means[f"rewards/{name}"] = Mean((beta * rows.ratio.detach() * these).sum(), count)
        means[f"logps/{name}"] = Mean((rows.policy.detach() * these).sum(), count)
    return means
