"""A micro-batch as a loss of one's own sees it: the padded inputs, and what they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowtide.compat.torch import version_of
from lowtide.data.batches.values import LENGTHS, NUMBER, PLACE
from lowtide.engine.heads.head import ScoreOutput
from lowtide.engine.padded import padded_inputs
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ragged import RaggedBatch, Segment


@dataclass
class MicroBatch:
    """What a loss is computed of."""

    batch: RaggedBatch
    inputs: dict[str, Tensor]
    """The padded form, as it was handed out."""
    index: Tensor
    """[scores]: the predicting places in it."""
    counts: Counts
    """Of the whole step over all ranks; in evaluation of this batch alone."""
    versions: dict[str, int] = field(default_factory=dict)
    """How often each tensor had been written to when it was handed out."""
    output: ScoreOutput | None = None
    """What the method's own loss found, if it was asked."""
    outcome: Outcome | None = None

    @classmethod
    def of(cls, batch: RaggedBatch, counts: Counts, *, pad_id: int, with_completions: bool) -> MicroBatch:
        """A batch in its padded form, the row values that a collator brought among the inputs."""
        lengths = batch.row_values[LENGTHS] if with_completions else None
        inputs, index = padded_inputs(batch, pad_id=pad_id, completion_tokens=lengths)
        inputs |= {name: each for name, each in batch.row_values.items() if name not in (NUMBER, PLACE, LENGTHS)}
        return cls(batch, inputs, index, counts, {name: version_of(each) for name, each in inputs.items()})

    @property
    def share(self) -> float:
        """Of the step's scored tokens, or pairs: what a mean over this micro-batch counts for."""
        size, name = (self.batch.scores, "scores") if "scores" in self.counts else (self.batch.rows, "pairs")
        return size / max(self.counts[name], 1)

    def is_as_given(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the tokens and labels of `inputs` are those that were handed out."""
        kept = [name for name in self.inputs if name in inputs]
        same = all(inputs[name] is self.inputs[name] for name in kept)
        return "input_ids" in kept and same and all(version_of(inputs[name]) == self.versions[name] for name in kept)


def are_whole(batch: RaggedBatch) -> bool:
    """Whether each completion of a batch is one segment, which ends with the tokens that are scored of it."""
    parts = [part for part in batch.segments if part.completion >= 0]
    lengths = batch.row_values[LENGTHS].tolist()
    counts = [min(lengths[part.row][part.completion], part.score_stop - part.score_start) for part in parts]
    scored = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    firsts = batch.score_index[[part.score_stop - count for part, count in scored]].tolist()
    return firsts == [_before(batch, *each) for each in scored] and len(parts) == batch.rows * batch.completions


def _before(batch: RaggedBatch, part: Segment, count: int) -> int:
    """The place from which the first of a segment's last tokens is predicted; of all of them the prefix's last one."""
    if part.length > count or part.prefix < 0:
        return part.stop - count - 1
    prefix = batch.segments[part.prefix]
    return (prefix.stop if part.prefix_length < 0 else prefix.start + part.prefix_length) - 1
