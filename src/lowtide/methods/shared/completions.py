"""How scores become statistics of rows: sums over completions, whichever form the prompt stands in.

A row ends with its completions, one segment each: chosen and rejected, or the one completion of an unpaired row.
Before them stands the prompt they share, or, in the repeated form, inside each of them. The collators say with the
row value `LENGTHS` how many tokens each completion has, and with the score value `OF_PROMPT`, where a method scores
prompts too, which scores those are.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.data.batches.values import OF_PROMPT
from lowtide.ragged import RaggedBatch, sent


def completion_segments(batch: RaggedBatch, count: int) -> list[Int[Tensor, " rows"]]:
    """For each place among a row's last `count` segments, the segments of all rows there."""
    ends = torch.tensor([numbers[-count:] for numbers in batch.row_segments])
    return list(sent(ends, batch.row.device).unbind(1))


def in_completion(batch: RaggedBatch, like: Tensor) -> Float[Tensor, " scores"]:
    """1 for each score of a completion, 0 for one of a prompt; in the dtype of `like`."""
    flags = batch.score_values.get(OF_PROMPT)
    return torch.ones_like(like).detach() if flags is None else (~flags).to(like.dtype)


def segment_sums(values: Float[Tensor, " scores"], batch: RaggedBatch) -> Float[Tensor, " segments"]:
    """Sums of scores over their segments."""
    return values.new_zeros(len(batch.segments)).index_add(0, batch.score_segment, values)


def row_sums(values: Float[Tensor, " scores"], batch: RaggedBatch) -> Float[Tensor, " rows"]:
    """Sums of scores over their rows."""
    return values.new_zeros(batch.rows).index_add(0, batch.row[batch.score_segment], values)


def place_in_segment(counted: Float[Tensor, " scores"], batch: RaggedBatch) -> Float[Tensor, " scores"]:
    """How many counted scores stand before each in its segment."""
    before = torch.cumsum(counted, 0) - counted
    totals = segment_sums(counted, batch)
    return before - (torch.cumsum(totals, 0) - totals)[batch.score_segment]
