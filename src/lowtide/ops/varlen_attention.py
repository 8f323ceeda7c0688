"""Causal attention over segments of unequal length, some of which share a prefix.

Queries are the tokens of a segment; keys are the tokens of its prefix, if it has one, then its own. The mask is
causal and aligned at the end, optionally with a sliding window. No mask of tokens x tokens exists anywhere, and no
segment ever sees another one that is not its prefix.

Two backends stand behind one function:

- `grouped`: any device and any variant. Segments of (nearly) equal length are batched together: under a causal
  mask, padding on the right changes no value on its left, so lengths may differ a little, and one
  `scaled_dot_product_attention` serves many segments. Soft-capping and sinks are computed in the open.
- `varlen`: `torch.nn.attention.varlen` on CUDA in half precision, which takes the segments as they are.

An `AttentionPlan` holds all that depends on the batch alone. It is made once a micro-batch, not once a layer.

Shapes: `heads` query heads, `kv_heads` key and value heads (`heads` is a multiple of it), `dim` a head's width.
Inside: `n` segments of a group, `q` their queries (padded), `k` their keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ragged import RaggedBatch, Segment

PADDING_TOLERANCE = 1.2
"""Segments join a group while its longest is at most so many times as long as they are."""
SMALL = 16
"""Lengths that differ by no more than this always join: so short, a call costs more than its padding."""
QUERY_BLOCK = 1024
"""Queries that see one explicit mask at a time, so that a mask is never larger than this times the keys."""


class Sight(NamedTuple):
    """What a query sees of the keys before it."""

    window: int | None = None
    """So many keys, itself included; None for all."""
    chunk: int | None = None
    """Only keys whose position lies in the same stretch of this length (Llama 4)."""

    def within(self, keys: int) -> Sight:
        """Without the limits that so many keys never reach."""
        window = None if self.window is None or self.window >= keys else self.window
        return Sight(window, None if self.chunk is None or self.chunk >= keys else self.chunk)


@dataclass(frozen=True)
class Group:
    """Segments computed together: `n` of them, padded on the right to `q` queries, after `p` prefix tokens."""

    n: int
    q: int
    p: int
    query_start: int
    """Where its queries stand among all groups' queries, in tokens; likewise its keys."""
    key_start: int


@dataclass(frozen=True)
class Gather:
    """A permutation of tokens into padded groups, and the way back."""

    index: Int[Tensor, " padded"]
    """For each place the token that goes there; padding repeats a token of its segment."""
    inverse: Int[Tensor, " tokens"]
    """For each token its own place."""
    shared: tuple[tuple[int, int, int], ...] = ()
    """(place, token, length) of each further copy: prefixes that stand before another segment's keys."""


@dataclass
class AttentionPlan:
    """How the segments of a batch are attended to; made once a batch and shared by all layers."""

    segments: tuple[Segment, ...]
    positions: Int[Tensor, " tokens"]
    groups: tuple[Group, ...]
    queries: Gather | None
    """None where the groups' queries are the tokens as they lie."""
    keys: Gather | None
    _cache: dict[tuple, Tensor] = field(default_factory=dict)
    _varlen: tuple | None = None

    @classmethod
    def build(cls, batch: RaggedBatch) -> AttentionPlan:
        """Groups the segments by prefix length and length."""
        segments, device = batch.segments, batch.token_ids.device
        prefixes = [segments[part.prefix].length if part.prefix >= 0 else 0 for part in segments]
        # Stable, so that equal lengths keep their order and groups of them need no gathering.
        order = sorted(range(len(segments)), key=lambda s: (prefixes[s], segments[s].length))
        clusters: list[list[int]] = []
        for number in order:
            last = clusters[-1] if clusters else None
            if last and prefixes[last[0]] == prefixes[number] and _close(segments[last[0]], segments[number]):
                last.append(number)
            else:
                clusters.append([number])

        groups: list[Group] = []
        queries, keys = _Places(), _Places()
        for cluster in clusters:
            width = segments[cluster[-1]].length
            group = Group(len(cluster), width, prefixes[cluster[0]], queries.count, keys.count)
            groups.append(group)
            for number in cluster:
                part = segments[number]
                queries.put(part, width)
                if part.prefix >= 0:
                    keys.share(segments[part.prefix])
                keys.put(part, width)
        return cls(
            segments=segments,
            positions=batch.position_ids,
            groups=tuple(groups),
            queries=queries.gather(batch.tokens, device),
            keys=keys.gather(batch.tokens, device),
        )

    def mask(self, q: range, k: range, p: int, sight: Sight) -> Tensor:
        """[q, k] bool, True where query i (at position p + i) sees key j; cached, since all layers ask for it."""
        key = (q, k, p, sight)
        if key not in self._cache:
            device = self.positions.device
            position = torch.arange(p + q.start, p + q.stop, device=device)[:, None]
            seen = torch.arange(k.start, k.stop, device=device)[None, :]
            mask = seen <= position
            if sight.window is not None:
                mask &= seen > position - sight.window
            if sight.chunk is not None:
                mask &= seen // sight.chunk == position // sight.chunk
            self._cache[key] = mask
        return self._cache[key]

    def tokens_back(self, distance: int) -> Tensor:
        """[tokens] the token so many places before each in its segment or the prefix of it, -1 where there is none."""
        key = ("back", distance)
        if key not in self._cache:
            source = torch.arange(self.segments[-1].stop) - distance
            for part in self.segments:
                before = self.segments[part.prefix] if part.prefix >= 0 else None
                for token in range(part.start, min(part.start + distance, part.stop)):
                    beyond = distance - (token - part.start)
                    inside = before is not None and beyond <= before.length
                    source[token] = before.stop - beyond if before is not None and inside else -1
            self._cache[key] = source.to(self.positions.device)
        return self._cache[key]

    def varlen_arguments(self) -> tuple[Tensor, Tensor, int, int, Gather | None]:
        """Cumulative query and key lengths (int32), the longest of each, and how keys are gathered."""
        if self._varlen is None:
            keys = _Places()
            lengths = []
            for part in self.segments:
                before = self.segments[part.prefix] if part.prefix >= 0 else None
                if before is not None:
                    keys.share(before)
                keys.put(part, part.length)
                lengths.append(part.length + (before.length if before is not None else 0))
            cumulative_q = torch.tensor([0, *(part.stop for part in self.segments)], dtype=torch.int32)
            cumulative_k = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
            self._varlen = (
                cumulative_q.to(self.positions.device),
                cumulative_k.to(self.positions.device),
                max(part.length for part in self.segments),
                max(lengths),
                keys.gather(self.segments[-1].stop, self.positions.device),
            )
        return self._varlen


def _close(shorter: Segment, longer: Segment) -> bool:
    return longer.length <= max(shorter.length * PADDING_TOLERANCE, shorter.length + SMALL)


class _Places:
    """Collects which token goes to which place."""

    def __init__(self) -> None:
        self.count = 0
        self.spans: list[tuple[int, int, int]] = []
        self.own: list[tuple[int, int, int]] = []
        self.shared: list[tuple[int, int, int]] = []
        self.padded = False

    def share(self, part: Segment) -> None:
        self.shared.append((self.count, part.start, part.length))
        self.spans.append((part.start, part.length, part.length))
        self.count += part.length

    def put(self, part: Segment, width: int) -> None:
        self.own.append((self.count, part.start, part.length))
        self.spans.append((part.start, part.length, width))
        self.padded |= width > part.length
        self.count += width

    def gather(self, tokens: int, device: torch.device) -> Gather | None:
        in_order = all(place == start for place, start, _ in self.own)
        if in_order and not self.padded and not self.shared:
            return None
        index = torch.cat([torch.arange(width).clamp_(max=n - 1).add_(start) for start, n, width in self.spans])
        inverse = torch.empty(tokens, dtype=torch.long)
        for place, start, length in self.own:
            inverse[start : start + length] = torch.arange(place, place + length)
        return Gather(index.to(device), inverse.to(device), tuple(self.shared))


class _GatherTokens(torch.autograd.Function):
    """`x[index]`, whose backward gathers too: adding row by row into an index is slow on every device."""

    @staticmethod
    def forward(ctx, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.index)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        # Padding queries' outputs are dropped and padding keys are masked: their gradients are exact zeros.
        result = grad.index_select(0, ctx.gather.inverse)
        for place, token, length in ctx.gather.shared:
            result[token : token + length] += grad[place : place + length]
        return result, None


class _ScatterTokens(torch.autograd.Function):
    """Padded places back to tokens: the transpose of `_GatherTokens` without shared copies."""

    @staticmethod
    def forward(ctx, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather, ctx.places = gather, x.shape[0]
        return x.index_select(0, gather.inverse)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        result = grad.new_zeros(ctx.places, *grad.shape[1:])
        return result.index_copy_(0, ctx.gather.inverse, grad), None


def varlen_attention(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens kv_heads dim"],
    value: Float[Tensor, "tokens kv_heads value_dim"],
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "tokens heads value_dim"]:
    """Causal attention within segments and from segments to their prefix.

    Args:
        plan: of the batch that the tokens belong to.
        scale: factor of the attention scores; `dim ** -0.5` if None.
        window: a query sees so many keys, itself included; None for all before it.
        chunk: a query sees only keys in the same stretch of so many positions (Llama 4); None for all.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: a learned score for each head that takes its share of the softmax and gives nothing (gpt-oss).
        dropout: probability of dropping an attention weight.

    Returns:
        What each token gathers, in the order of the tokens.
    """
    variant = _Variant(query.shape[-1] ** -0.5 if scale is None else scale, softcap, sinks, dropout)
    sight = Sight(window, chunk).within(max(group.p + group.q for group in plan.groups))
    half_on_cuda = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if half_on_cuda and variant.plain and sight.chunk is None and query.shape[-1] <= 256:
        return _varlen(query, key, value, plan, variant.scale, sight.window)
    return _grouped(query, key, value, plan, sight, variant)


class _Variant(NamedTuple):
    scale: float
    softcap: float | None
    sinks: Tensor | None
    dropout: float

    @property
    def plain(self) -> bool:
        return not self.in_the_open and self.dropout == 0.0

    @property
    def in_the_open(self) -> bool:
        """Whether the scores have to be written out, because no kernel knows what is done to them."""
        return self.softcap is not None or self.sinks is not None


def _varlen(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cumulative_q, cumulative_k, longest_q, longest_k, gather = plan.varlen_arguments()
    if gather is not None:
        key, value = _GatherTokens.apply(key, gather), _GatherTokens.apply(value, gather)
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    # (w, 0) is w keys before the query and the query itself; (-1, 0) is all of them.
    sight = (-1 if window is None else window - 1, 0)
    lengths = (cumulative_q, cumulative_k, longest_q, longest_k)
    return varlen_attn(query, key, value, *lengths, scale=scale, window_size=sight)


def _grouped(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, sight: Sight, variant: _Variant) -> Tensor:
    if plan.queries is not None:
        query = _GatherTokens.apply(query, plan.queries)
    if plan.keys is not None:
        key, value = _GatherTokens.apply(key, plan.keys), _GatherTokens.apply(value, plan.keys)
    outputs = []
    for group in plan.groups:
        keys = group.p + group.q
        q = _heads_first(query, group.query_start, group.n, group.q)
        k = _heads_first(key, group.key_start, group.n, keys)
        v = _heads_first(value, group.key_start, group.n, keys)
        out = _attend(q, k, v, plan, group.p, sight.within(keys), variant)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if plan.queries is None else _ScatterTokens.apply(out, plan.queries)


def _heads_first(x: Tensor, start: int, n: int, length: int) -> Tensor:
    """[tokens, heads, dim] to [n, heads, length, dim], a view."""
    return x.narrow(0, start, n * length).unflatten(0, (n, length)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, p: int, sight: Sight, variant: _Variant) -> Tensor:
    """One group, in blocks of queries wherever a mask has to be written down. [n, heads, q, dim]"""
    if p == 0 and sight == Sight() and not variant.in_the_open:
        return _sdpa(q, k, v, None, variant)
    blocks = []
    for start in range(0, q.shape[2], QUERY_BLOCK):
        queries = range(start, min(start + QUERY_BLOCK, q.shape[2]))
        keys = range(0 if sight.window is None else max(0, p + start - sight.window + 1), p + queries.stop)
        mask = plan.mask(queries, keys, p, sight)
        attend = _open if variant.in_the_open else _sdpa
        blocks.append(
            attend(
                q[:, :, queries.start : queries.stop],
                k[:, :, keys.start : keys.stop],
                v[:, :, keys.start : keys.stop],
                mask,
                variant,
            )
        )
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, variant: _Variant) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=variant.dropout,
        is_causal=mask is None,
        scale=variant.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _open(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, variant: _Variant) -> Tensor:
    """Attention with its scores written out, at least in float32 from the scores to the weights."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(-1, -2)) * variant.scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(~mask, float("-inf"))
    if variant.sinks is not None:
        sink = variant.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return F.dropout(weights.to(q.dtype), p=variant.dropout) @ v
