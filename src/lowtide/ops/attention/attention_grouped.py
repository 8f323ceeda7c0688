"""Ragged attention on any device and for any rule, from batched dense attention.

Segments of (nearly) equal length are batched together: under a causal mask, padding on the right changes no value on
its left, so lengths may differ a little, and one `scaled_dot_product_attention` serves many segments. Without it, only
segments of equal lengths are batched. Soft-capping and sinks are computed in the open. It is the reference of
the other backends.

Shapes: `n` segments of a group, `q` their queries (padded), `p` the tokens of their prefix, `k` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.compat.torch import cpu_flash, cpu_flash_backward
from lowtide.ops.attention.attention_plan import AttentionPlan, Gather, Places, Rules, Sight, gathered, scattered
from lowtide.ops.attention.value_width import of_one_width
from lowtide.ops.dropout import drops_here, written_attention
from lowtide.ops.target import target_of
from lowtide.ragged import Segment, sent

PADDING_TOLERANCE = 1.2
"""Segments join a group while its longest is at most so many times as long as they are."""
SHORT_AREA = 1 << 14
"""Queries times their dimension up to which a CPU's attention goes backward in float32: in bfloat16 each head of each
segment costs some 0.1 ms more, which products that are faster make up for above."""
SMALL = 16
"""Lengths that differ by no more than this always join: so short, a call costs more than its padding."""
SMALL_AREA = 1 << 14
"""Queries times keys below which a further call costs more than the padding that spares it."""
MIXED_KEYS = 1024
"""Prefixes of unlike lengths share a call up to so many keys; each segment has a mask of its own there."""
QUERY_BLOCK = 1024
"""Queries that see one explicit mask at a time, so that a mask is never larger than this times the keys."""


@dataclass(frozen=True)
class Group:
    """Segments computed together: `n` of them, padded on the right to `q` queries, after `p` prefix tokens."""

    n: int
    q: int
    p: int
    leads: tuple[int, ...]
    """How many of the prefix places each segment leaves empty, at their start; empty if none does."""
    across: bool = False
    """Whether prefixes are of another sequence, and keys are theirs alone."""

    @property
    def keys(self) -> int:
        """Of each segment, padding included."""
        return self.p if self.across else self.p + self.q


@dataclass(frozen=True)
class Grouping:
    """All groups of a batch, and how tokens get there."""

    groups: tuple[Group, ...]
    queries: Gather | None
    """None where the groups' queries are the tokens as they lie."""
    keys: Gather | None


def grouping(plan: AttentionPlan, *, causal: bool = True) -> Grouping:
    """The segments grouped by prefix length and length."""
    return plan.once(("grouping", causal), lambda: _group(plan, causal))


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """As `varlen_attention`."""
    all_groups = grouping(plan, causal=rules.causal)
    query = gathered(query, all_groups.queries)
    key, value = gathered(key, all_groups.keys), gathered(value, all_groups.keys)
    groups = all_groups.groups
    # Split at once: each narrowing would have a gradient of the size of the whole.
    queries = query.split([group.n * group.q for group in groups])
    keys, values = (x.split([group.n * group.keys for group in groups]) for x in (key, value))
    outputs = []
    for group, *own in zip(groups, queries, keys, values, strict=True):
        q, k, v = (x.unflatten(0, (group.n, -1)).transpose(1, 2) for x in own)  # [n, heads, length, dim]
        out = _attend(q, k, v, plan, group, rules._replace(sight=rules.sight.within(group.keys)))
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return scattered(outputs[0] if len(outputs) == 1 else torch.cat(outputs), all_groups.queries)


def _group(plan: AttentionPlan, causal: bool) -> Grouping:
    segments = plan.segments
    befores = [plan.before(part) for part in segments]
    prefixes = [0 if before is None else before.length for before in befores]
    groups: list[Group] = []
    queries, keys, across = Places(), Places(), plan.others is not None
    close = (*_alone(segments, prefixes), *_prefixed(segments, prefixes)) if causal else _equal(segments, prefixes)
    for cluster in close:
        width = max(segments[number].length for number in cluster)
        prefix = max(prefixes[number] for number in cluster)
        leads = tuple(prefix - prefixes[number] for number in cluster)
        groups.append(Group(len(cluster), width, prefix, leads if any(leads) else (), across))
        for number in cluster:
            part, before = segments[number], befores[number]
            queries.put(part, width)
            if across and before is not None:
                keys.put_or_share(before)
                continue
            if before is not None:
                keys.skip(prefix - before.length, before)
                (keys.put_or_share if plan.carried else keys.share)(before)
            keys.put(part, width)
    return Grouping(tuple(groups), queries.gather(plan, plan.tokens), keys.gather(plan, plan.key_tokens))


def _alone(segments: Sequence[Segment], prefixes: Sequence[int]) -> list[list[int]]:
    """Segments without a prefix, together where their lengths are close."""
    # Stable, so that equal lengths keep their order and groups of them need no gathering.
    order = sorted((n for n, p in enumerate(prefixes) if p == 0), key=lambda n: segments[n].length)
    clusters: list[list[int]] = []
    for number in order:
        if clusters and _close(segments[clusters[-1][0]], segments[number]):
            clusters[-1].append(number)
        else:
            clusters.append([number])
    return clusters


def _equal(segments: Sequence[Segment], prefixes: Sequence[int]) -> list[list[int]]:
    """Segments of equal lengths after prefixes of equal lengths: padding among their keys would be seen."""
    clusters: dict[tuple[int, int], list[int]] = {}
    for number, part in enumerate(segments):
        clusters.setdefault((prefixes[number], part.length), []).append(number)
    return list(clusters.values())


def _prefixed(segments: Sequence[Segment], prefixes: Sequence[int]) -> list[list[int]]:
    """Segments with a prefix, together where the padding of prefixes and of their own tokens costs little."""
    clusters: list[_Cluster] = []
    order = sorted((n for n, p in enumerate(prefixes) if p), key=lambda n: (segments[n].length, prefixes[n]))
    for number in order:
        added = (cluster.with_segment(number, segments[number].length, prefixes[number]) for cluster in clusters)
        place, grown = next(((i, each) for i, each in enumerate(added) if each.pays), (None, None))
        if grown is None or place is None:
            clusters.append(_Cluster().with_segment(number, segments[number].length, prefixes[number]))
        else:
            clusters[place] = grown
    return [list(cluster.numbers) for cluster in clusters]


@dataclass(frozen=True)
class _Cluster:
    """Segments that may be computed together, and what that costs in queries times keys."""

    numbers: tuple[int, ...] = ()
    q: int = 0
    p: int = 0
    area: int = 0
    """Without padding."""
    mixed: bool = False
    """Whether their prefixes have unlike lengths."""

    def with_segment(self, number: int, length: int, prefix: int) -> _Cluster:
        return _Cluster(
            (*self.numbers, number),
            max(self.q, length),
            max(self.p, prefix),
            self.area + length * (prefix + length),
            self.mixed or (bool(self.numbers) and prefix != self.p),
        )

    @property
    def pays(self) -> bool:
        """Whether one call costs no more than several."""
        if self.mixed and self.p + self.q > MIXED_KEYS:
            return False
        count = len(self.numbers)
        padded = count * self.q * (self.p + self.q)
        return padded <= self.area * PADDING_TOLERANCE**2 or padded - self.area <= count * SMALL_AREA


def _close(shorter: Segment, longer: Segment) -> bool:
    return longer.length <= max(shorter.length * PADDING_TOLERANCE, shorter.length + SMALL)


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, group: Group, rules: Rules) -> Tensor:
    """One group, in blocks of queries wherever a mask or scores have to be written down. [n, heads, q, dim]"""
    # No kernel of `scaled_dot_product_attention` knows what these do to the scores.
    in_the_open = rules.softcap is not None or rules.sinks is not None
    if in_the_open and rules.bias is not None:
        raise ValueError("attention with biases by distance knows no soft-cap and no sinks")
    written_out = rules.bias is not None or drops_here(q, rules.dropout)
    unlimited = rules.sight == Sight() and not in_the_open
    if (group.p == 0 or not rules.causal) and unlimited and not written_out:
        return _sdpa(q, k, v, None, rules)
    attend = _open if in_the_open else _sdpa
    blocks = []
    for start in range(0, q.shape[2], QUERY_BLOCK):
        queries = range(start, min(start + QUERY_BLOCK, q.shape[2]))
        window = rules.sight.window
        last = group.p + queries.stop if rules.causal else group.keys
        keys = range(0 if window is None else max(0, group.p + start - window + 1), last)
        mask = _mask(plan, queries, keys, group, rules) if rules.causal or not unlimited else None
        seen, own = slice(keys.start, keys.stop), _of_block(rules, group, queries, keys)
        blocks.append(attend(q[:, :, queries.start : queries.stop], k[:, :, seen], v[:, :, seen], mask, own))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _of_block(rules: Rules, group: Group, queries: range, keys: range) -> Rules:
    """The rules with the biases of some queries and keys: from the last query to the first key upwards."""
    if rules.bias is None:
        return rules
    zero = rules.bias.shape[1] // 2 - group.p
    return rules._replace(bias=rules.bias[:, zero + keys.start - queries.stop + 1 : zero + keys.stop - queries.start])


def _mask(plan: AttentionPlan, q: range, k: range, group: Group, rules: Rules) -> Tensor:
    """[q, k] bool, True where query i (at position p + i) sees key j; [n, 1, q, k] where prefixes are unlike."""
    sight, causal = rules.sight, rules.causal

    def make() -> Tensor:
        position = torch.arange(group.p + q.start, group.p + q.stop, device=plan.device)[:, None]
        seen = torch.arange(k.start, k.stop, device=plan.device)[None, :]
        if group.leads:
            lead = sent(torch.tensor(group.leads), plan.device)[:, None, None, None]
            position, seen = position - lead, seen - lead
        mask = (seen <= position if causal else position >= 0) & (seen >= 0)
        if sight.window is not None:
            mask &= seen > position - sight.window
            if not causal:
                mask &= seen < position + sight.window
        if sight.chunk is not None:
            mask &= seen // sight.chunk == position // sight.chunk
        return mask

    return plan.once(("mask", q, k, group.p, group.leads, sight, causal), make)


@of_one_width
def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    written_out = rules.bias is not None or drops_here(q, rules.dropout)
    back_in_float32 = not written_out and _goes_back_in_float32(q, v, rules)
    if repeat > 1 and (written_out or back_in_float32 or not _shares_keys(q, mask)):
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if written_out:
        return written_attention(q, k, v, mask, rules.scale, rules.dropout, rules.bias)
    if back_in_float32:
        return _BackInFloat32.apply(q, k, v, mask, mask is None and rules.causal, rules.scale)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=rules.dropout,
        is_causal=mask is None and rules.causal,
        scale=rules.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _goes_back_in_float32(q: Tensor, v: Tensor, rules: Rules) -> bool:
    """Whether the backward of a CPU's kernel for 16 bits is slower, for what it does beside its products."""
    if q.dtype not in (torch.bfloat16, torch.float16) or target_of(q).kind != "cpu" or rules.dropout > 0:
        return False
    return 0 < q.shape[2] * q.shape[3] <= SHORT_AREA and q.shape[3] == v.shape[3]


class _BackInFloat32(torch.autograd.Function):
    """A CPU's flash attention, whose gradients are computed in float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
        out, lse = cpu_flash(q, k, v, causal, scale, mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.how = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *narrow, lse, mask = ctx.saved_tensors
        grad, q, k, v, out = (each.float() for each in (grads[0], *narrow))
        causal, scale = ctx.how
        found = cpu_flash_backward(grad, q, k, v, (out, lse), causal, scale, None if mask is None else mask.float())
        return (*(each.to(narrow[0].dtype) for each in found), None, None, None)


def _shares_keys(q: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a kernel in which several query heads read one head of keys.

    On CUDA that is flash attention alone, which knows neither masks nor float32; elsewhere torch would write all scores
    out, which take more than keys for each query head (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
    """
    target = target_of(q)
    half = q.dtype in (torch.float16, torch.bfloat16)
    return target.kind != "cuda" or (mask is None and half and target.capability >= (8, 0))


def _open(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules) -> Tensor:
    """Attention with its scores written out, at least in float32 from the scores to the weights."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(-1, -2)) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rules.sinks is not None:
        sink = rules.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return F.dropout(weights.to(q.dtype), p=rules.dropout) @ v
