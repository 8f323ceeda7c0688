"""The padded form of a batch, as collators of TRL give it, and statistics of scores from dense logits.

For losses that people write themselves over `model(**inputs).logits`. Nothing else in lowtide holds logits.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.engine.forward import pad
from lowtide.ops.linear_logprobs import TokenStats, Want
from lowtide.ragged import IGNORE, RaggedBatch


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


def dense_stats(
    logits: Float[Tensor, "lines longest vocab"],
    index: Int[Tensor, " scores"],
    target: Int[Tensor, " scores"],
    want: Want,
) -> TokenStats:
    """What `ops.linear_logprobs` gives, from logits that are there; with gradients, but for `top1` and `collisions`."""
    chosen = logits.flatten(0, 1).index_select(0, index).float()
    logprobs = torch.log_softmax(chosen, -1)
    own = logprobs.gather(-1, target[:, None])[:, 0]
    given: dict[str, Any] = {}
    if want.entropies:
        given["entropies"] = -(logprobs.exp() * logprobs).sum(-1)
    if want.mean_logprobs:
        given["mean_logprobs"] = logprobs.mean(-1)
    if want.top1:
        given["top1"] = own >= logprobs.amax(-1)
    if want.collisions:
        given["collisions"] = torch.logsumexp(2 * logprobs.detach(), -1)
    return TokenStats(own, **given)
