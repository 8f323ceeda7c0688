"""The padded form of a batch, as collators of TRL give it.

For losses that people write themselves over `model(**inputs).logits`. Nothing else in lowtide holds logits.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from lowtide.engine.forward import pad
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE


def padded_inputs(
    batch: RaggedBatch, *, pad_id: int = 0, completion_tokens: Int[Tensor, "rows completions"] | None = None
) -> tuple[dict[str, Tensor], Int[Tensor, " scores"]]:
    """A batch as [lines, longest], padded on the right.

    Args:
        pad_id: the token in the places that hold none.
        completion_tokens: of each completion of each row, where rows have completions.

    Returns:
        `input_ids`, `attention_mask` and `labels`, a line for each segment; or, where rows have completions,
        `input_ids`, `attention_mask` and `completion_mask`, the first completions of all rows before the second ones;
        and for each score its predicting place in the flattened batch.
    """
    inputs, index = pad(batch)
    lines, longest = inputs["input_ids"].shape
    if completion_tokens is not None:
        order = torch.arange(lines, device=index.device).view(-1, completion_tokens.shape[1]).T.flatten()
        inputs = {name: each[order] for name, each in inputs.items()}
        index = torch.argsort(order)[index // longest] * longest + index % longest
    mask = inputs["attention_mask"]
    inputs["input_ids"] = inputs["input_ids"].masked_fill(mask == 0, pad_id)
    if completion_tokens is None:
        labels = torch.full_like(mask, IGNORE).flatten()
        labels[index + 1] = batch.score_target
        return {**inputs, "labels": labels.view_as(mask)}, index
    before = mask.sum(1) - completion_tokens.T.flatten().to(mask.device)
    place = torch.arange(longest, device=mask.device)
    return {**inputs, "completion_mask": mask * (place >= before[:, None])}, index
