"""How scores become statistics of rows: sums over completions, whichever form the prompt stands in.

A row has its completions, chosen and rejected, or the one completion of an unpaired row, each in one segment or in
several: `Segment.completion` says which. Before them stands the prompt they share, or, in the repeated form, inside
each of them. The collators say with the row value `LENGTHS` how many tokens each completion has, and with the score
value `OF_PROMPT`, where a method scores prompts too, which scores those are.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.data.batches.values import OF_PROMPT
from lowtide.ragged import RaggedBatch


def completion_of_scores(batch: RaggedBatch) -> Int[Tensor, " scores"]:
    """Of which completion each score is, by its place in its row; -1 of none."""
    return batch.completion[batch.score_segment]


def in_completion(batch: RaggedBatch, like: Tensor) -> Float[Tensor, " scores"]:
    """1 for each score of a completion, 0 for one of a prompt; in the dtype of `like`."""
    flags = batch.score_values.get(OF_PROMPT)
    return torch.ones_like(like).detach() if flags is None else (~flags).to(like.dtype)


def completion_sums(values: Float[Tensor, " scores"], batch: RaggedBatch) -> Float[Tensor, "rows completions"]:
    """Sums of scores over the completions of rows, whose segments are added up."""
    sums = values.new_zeros(batch.rows * batch.completions + 1)
    return sums.index_add(0, _places(batch), values)[:-1].view(batch.rows, batch.completions)


def of_scores(values: Float[Tensor, "rows completions"], batch: RaggedBatch) -> Float[Tensor, " scores"]:
    """For each score the value of its completion; 0 for a score of none."""
    return torch.cat([values.flatten(), values.new_zeros(1)])[_places(batch)]


def _places(batch: RaggedBatch) -> Int[Tensor, " scores"]:
    """Where the completion of each score stands among those of all rows; of none, behind them."""
    last = batch.rows * batch.completions
    places = torch.where(batch.completion < 0, last, batch.row * batch.completions + batch.completion)
    return places[batch.score_segment]


def row_sums(values: Float[Tensor, " scores"], batch: RaggedBatch) -> Float[Tensor, " rows"]:
    """Sums of scores over their rows."""
    return values.new_zeros(batch.rows).index_add(0, batch.row[batch.score_segment], values)


def place_in_completion(counted: Float[Tensor, " scores"], batch: RaggedBatch) -> Float[Tensor, " scores"]:
    """How many counted scores, each of which is of a completion, stand before each in its completion."""
    before = torch.cumsum(counted, 0) - counted
    totals = completion_sums(counted, batch)
    return before - of_scores((torch.cumsum(totals.flatten(), 0).view_as(totals) - totals), batch)
