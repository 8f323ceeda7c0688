"""Attention of segments with long prefixes on a CPU: their own keys and those of their prefix are two blocks, merged by
the log-sum-exp of their scores (`ops.attention.attention_blocks`).

Keys are read where they lie: no prefix is copied beside the keys of a segment, no mask is written, and nothing is
computed that a mask would hide. Of short segments, or short prefixes, one call for many of them is faster.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from lowtide.ops.attention.attention_blocks import Merged, Part, block_kernel, in_blocks
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules, Sight
from lowtide.ops.target import target_of

AREA = 1 << 16
"""Queries times keys of the middle one of all segments, from which a call of its own for each block costs less."""


def by_prefix_blocks(query: Tensor, plan: AttentionPlan, rules: Rules) -> bool:
    """Whether a call is faster in blocks: on a CPU, where nothing limits or changes what a query sees, for segments of
    which some have prefixes and that are long. In 16 bits each block would be rounded."""
    changed = rules.softcap is not None or rules.sinks is not None or rules.bias is not None or rules.dropout > 0
    if (
        changed
        or not rules.causal
        or rules.sight != Sight()
        or plan.others is not None
        or plan.carried
        or target_of(query).kind != "cpu"
    ):
        return False
    return query.dtype in (torch.float32, torch.float64) and plan.once("prefix blocks", lambda: _are_long(plan))


def _are_long(plan: AttentionPlan) -> bool:
    if all(plan.before(part) is None for part in plan.segments):
        return False
    return statistics.median_low(part.length * plan.keys(part) for part in plan.segments) >= AREA


def prefix_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """As `varlen_attention`, under the rules that `by_prefix_blocks` takes."""
    return _OverPrefixes.apply(query, key, value, plan, rules)


class _OverPrefixes(torch.autograd.Function):
    """Attention of each segment to itself, and to its prefix as far as it sees it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
        kernel, parts = block_kernel(query, value, rules), list[Part]()
        with in_blocks(), torch.autocast(query.device.type, enabled=False):
            for part in plan.segments:
                own, before = slice(part.start, part.stop), plan.before(part)
                merged = Merged(kernel.forward(query[own], key[own], value[own], rules, causal=True))
                if before is not None:
                    seen = slice(before.start, before.stop)
                    merged.add(kernel.forward(query[own], key[seen], value[seen], rules, causal=False))
                parts.append(Part(merged.out, merged.lse))
        out, lse = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.rules = plan, rules
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan, rules = ctx.plan, ctx.rules
        kernel, (of_query, of_key, of_value) = (
            block_kernel(query, value, rules),
            map(torch.empty_like, (query, key, value)),
        )
        for part in plan.segments:
            own, before = slice(part.start, part.stop), plan.before(part)
            given = grads[0][own], query[own]
            merged = Part(out[own], lse[own])
            of_query[own], of_key[own], of_value[own] = kernel.backward(
                *given, key[own], value[own], merged, rules, causal=True
            )
            if before is None:
                continue
            seen = slice(before.start, before.stop)  # which stands before the segment, so that its own part is there
            found = kernel.backward(*given, key[seen], value[seen], merged, rules, causal=False)
            for whole, place, more in zip((of_query, of_key, of_value), (own, seen, seen), found, strict=True):
                whole[place] += more
        return of_query, of_key, of_value, None, None
