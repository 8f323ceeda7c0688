"""Attention of each segment alone, by the textbook: the reference of every backend, and what it is asked for."""

import torch

from lowtide.ragged import RaggedBatch

LENGTHS = {
    "equal": ([5, 5, 5], [-1, -1, -1]),
    "unequal": ([1, 30, 2, 7, 31, 19, 70], [-1] * 7),
    "prefix": ([6, 3, 9, 1, 4, 4, 2], [-1, 0, 0, -1, -1, 4, 4]),
    "tree": ([9, 3, 9, 1, 4, 12, 2, 2], [-1, 0, 0, 0, -1, -1, 5, 5], [-1, 4, 7, 1, -1, -1, 11, -1]),
    "long": ([50, 2100, 3], [-1, 0, -1]),
}
VARIANTS = {
    "causal": {},
    "scale": {"scale": 0.3},
    "window": {"window": 4},
    "chunk": {"chunk": 5},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, 4, dtype=torch.float64)},
    "all": {"window": 3, "softcap": 2.0, "sinks": torch.ones(4, dtype=torch.float64), "scale": 0.7},
}


def dense(q, k, v, batch, scale=None, window=None, chunk=None, softcap=None, sinks=None, causal=True):
    """One segment at a time, by the textbook. [tokens, heads, dim]"""
    outputs = []
    for part in batch.segments:
        spans = [slice(part.start, part.stop)]
        if part.prefix >= 0:
            before = batch.segments[part.prefix]
            seen = before.length if part.prefix_length < 0 else part.prefix_length
            spans.insert(0, slice(before.start, before.start + seen))
        keys = torch.cat([k[s] for s in spans]).repeat_interleave(2, dim=1)
        values = torch.cat([v[s] for s in spans]).repeat_interleave(2, dim=1)
        queries = q[part.start : part.stop]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (scale or q.shape[-1] ** -0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        ahead = len(keys) - len(queries)
        position = torch.arange(len(queries))[:, None] + ahead
        visible = torch.arange(len(keys))[None] <= position
        if not causal:
            visible = torch.ones_like(visible)
        if window is not None:
            visible &= (torch.arange(len(keys))[None] - position).abs() < window
        if chunk is not None:
            visible &= torch.arange(len(keys))[None] // chunk == position // chunk
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.view(-1, 1, 1).expand(-1, len(queries), 1)
            weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def ragged(lengths: list[int], prefix: list[int], seen: list[int] | None = None) -> RaggedBatch:
    """Segments of these lengths; those that share a prefix are one row with it, and see so much of it."""
    row = [sum(p == -1 for p in prefix[: i + 1]) - 1 for i in range(len(prefix))]
    places = list(zip(prefix, [-1] * len(prefix) if seen is None else seen, strict=True))
    return RaggedBatch.from_segments([[1] * n for n in lengths], prefix=places, row=row)
