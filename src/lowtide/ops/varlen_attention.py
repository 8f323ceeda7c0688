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

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ragged import Segment

PADDING_TOLERANCE = 1.2
"""Segments join a group while its longest is at most so many times as long as they are."""
SMALL = 16
"""Lengths that differ by no more than this always join: so short, a call costs more than its padding."""
QUERY_BLOCK = 1024
"""Queries that see one explicit mask at a time, so that a mask is never larger than this times the keys."""


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
    groups: tuple[Group, ...]
    queries: Gather | None
    """None where the groups' queries are the tokens as they lie."""
    keys: Gather | None
    device: torch.device
    _masks: dict[tuple, Tensor] = field(default_factory=dict)
    _varlen: tuple | None = None

    @classmethod
    def build(cls, segments: Sequence[Segment], device: torch.device) -> AttentionPlan:
        """Groups the segments by prefix length and length.

        Args:
            segments: of a `RaggedBatch`.
            device: where the tensors of the batch are.
        """
        prefixes = [segments[part.prefix].length if part.prefix >= 0 else 0 for part in segments]
        # Stable, so that equal lengths keep their order and groups of them need no gathering.
        order = sorted(range(len(segments)), key=lambda s: (prefixes[s], segments[s].length))
        batches: list[list[int]] = []
        for number in order:
            last = batches[-1] if batches else None
            if last and prefixes[last[0]] == prefixes[number] and _close(segments[last[0]], segments[number]):
                last.append(number)
            else:
                batches.append([number])

        groups: list[Group] = []
        queries, keys = _Places(), _Places()
        for batch in batches:
            width = segments[batch[-1]].length
            group = Group(len(batch), width, prefixes[batch[0]], queries.count, keys.count)
            groups.append(group)
            for number in batch:
                part = segments[number]
                queries.put(part, width)
                if part.prefix >= 0:
                    keys.share(segments[part.prefix])
                keys.put(part, width)
        tokens = segments[-1].stop
        return cls(
            tuple(segments), tuple(groups), queries.gather(tokens, device), keys.gather(tokens, device), device
        )

    def mask(self, q_start: int, q_stop: int, k_start: int, k_stop: int, p: int, window: int | None) -> Tensor:
        """[q, k] bool, True where query i (at position p + i) sees key j; cached, since all layers ask for it."""
        key = (q_start, q_stop, k_start, k_stop, p, window)
        if key not in self._masks:
            position = torch.arange(p + q_start, p + q_stop, device=self.device)[:, None]
            seen = torch.arange(k_start, k_stop, device=self.device)[None, :]
            mask = seen <= position
            if window is not None:
                mask &= seen > position - window
            self._masks[key] = mask
        return self._masks[key]

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
                cumulative_q.to(self.device),
                cumulative_k.to(self.device),
                max(part.length for part in self.segments),
                max(lengths),
                keys.gather(self.segments[-1].stop, self.device),
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
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "tokens heads value_dim"]:
    """Causal attention within segments and from segments to their prefix.

    Args:
        plan: of the batch that the tokens belong to.
        scale: factor of the attention scores; `dim ** -0.5` if None.
        window: a query sees so many keys, itself included; None for all before it.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: a learned score for each head that takes its share of the softmax and gives nothing (gpt-oss).
        dropout: probability of dropping an attention weight.

    Returns:
        What each token gathers, in the order of the tokens.
    """
    plain = softcap is None and sinks is None and dropout == 0.0
    if plain and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
        return _varlen(query, key, value, plan, scale, window)
    return _grouped(query, key, value, plan, scale, window, softcap, sinks, dropout)


def _varlen(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale, window) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cumulative_q, cumulative_k, longest_q, longest_k, gather = plan.varlen_arguments()
    if gather is not None:
        key, value = _GatherTokens.apply(key, gather), _GatherTokens.apply(value, gather)
    # A window of (w, 0) sees w keys before the query and the query itself.
    left = -1 if window is None or window >= longest_k else window - 1
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return varlen_attn(
        query, key, value, cumulative_q, cumulative_k, longest_q, longest_k, scale=scale, window_size=(left, 0)
    )


def _grouped(query, key, value, plan: AttentionPlan, scale, window, softcap, sinks, dropout) -> Tensor:
    if plan.queries is not None:
        query = _GatherTokens.apply(query, plan.queries)
    if plan.keys is not None:
        key, value = _GatherTokens.apply(key, plan.keys), _GatherTokens.apply(value, plan.keys)
    outputs = []
    for group in plan.groups:
        q_nqhd = query.narrow(0, group.query_start, group.n * group.q).unflatten(0, (group.n, group.q))
        keys = group.p + group.q
        k_nkhd = key.narrow(0, group.key_start, group.n * keys).unflatten(0, (group.n, keys))
        v_nkhd = value.narrow(0, group.key_start, group.n * keys).unflatten(0, (group.n, keys))
        out_nhqd = _attend(
            *(x.transpose(1, 2) for x in (q_nqhd, k_nkhd, v_nkhd)),
            plan,
            group,
            scale,
            window,
            softcap,
            sinks,
            dropout,
        )
        outputs.append(out_nhqd.transpose(1, 2).flatten(0, 1))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if plan.queries is None else _ScatterTokens.apply(out, plan.queries)


def _attend(q, k, v, plan: AttentionPlan, group: Group, scale, window, softcap, sinks, dropout) -> Tensor:
    """One group, in blocks of queries wherever a mask has to be written down. [n, heads, q, dim]"""
    if window is not None and window >= group.p + group.q:
        window = None
    in_the_open = softcap is not None or sinks is not None
    if group.p == 0 and window is None and not in_the_open:
        return _sdpa(q, k, v, None, scale, dropout)
    blocks = []
    for q_start in range(0, group.q, QUERY_BLOCK):
        q_stop = min(q_start + QUERY_BLOCK, group.q)
        k_start = 0 if window is None else max(0, group.p + q_start - window + 1)
        k_stop = group.p + q_stop
        mask = plan.mask(q_start, q_stop, k_start, k_stop, group.p, window)
        part = (q[:, :, q_start:q_stop], k[:, :, k_start:k_stop], v[:, :, k_start:k_stop], mask, scale, dropout)
        blocks.append(_open(*part, softcap, sinks) if in_the_open else _sdpa(*part))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _open(q, k, v, mask: Tensor, scale: float | None, dropout: float, softcap: float | None, sinks) -> Tensor:
    """Attention with its scores written out, in float32 from the scores to the weights."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (
        scores.float().masked_fill(~mask, float("-inf"))
        if q.dtype != torch.float64
        else (scores.masked_fill(~mask, float("-inf")))
    )
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = F.dropout(weights.to(q.dtype), p=dropout)
    return weights @ v
