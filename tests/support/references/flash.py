"""torch's flash attention with a number of used keys, segment by segment: what stands for it where there is no GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_of_used(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    used: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `compat.torch.cuda_flash_of_used`, of tensors of one head."""
    out, lse = (
        torch.empty_like(query),
        torch.empty(query.shape[1], len(query), dtype=torch.promote_types(query.dtype, torch.float32)),
    )
    bounds, key_starts = starts[0].tolist(), starts[1].tolist()
    assert bounds[-1] == len(query)
    for first, last, start, end, count in zip(
        bounds, bounds[1:], key_starts, key_starts[1:], used.tolist(), strict=False
    ):
        assert last - first <= longest[0]
        assert 1 <= count <= end - start <= longest[1]
        seen = slice(start, start + count)
        scores = (query[first:last, 0].to(lse.dtype) @ key[seen, 0].to(lse.dtype).T) * scale
        lse[0, first:last] = scores.logsumexp(-1)
        out[first:last, 0] = (scores.softmax(-1) @ value[seen, 0].to(lse.dtype)).to(out.dtype)
    return out, lse
