"""Ragged attention by kernels that take segments of unequal length as they are: flash-attn 3 and 2, and torch's own.

Where a layer is causal, all three align its mask at the end where a segment has more keys than queries, which is what a
prefix before it asks for. They know windows; flash-attn knows soft-caps too. The prefix's keys are copied before each
segment's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan, Gather, Places, Rules, gathered
from lowtide.ops.attention.value_width import of_one_width
from lowtide.ops.target import target_of
from lowtide.ragged import sent


class Lengths(NamedTuple):
    """The segments as these kernels want them."""

    queries: Int32[Tensor, " segments+1"]
    """Where each segment's queries start and end; likewise its keys, those of its prefix included."""
    keys: Int32[Tensor, " segments+1"]
    longest_queries: int
    longest_keys: int
    gather: Gather | None
    """How keys get there; None where they lie there already."""


def lengths(plan: AttentionPlan) -> Lengths:
    """From host integers; one small copy to the device a batch."""
    return plan.once("lengths", lambda: _lengths(plan))


def _lengths(plan: AttentionPlan) -> Lengths:
    places = Places()
    for part in plan.segments:
        before = plan.before(part)
        if plan.others is not None and before is not None:
            places.put_or_share(before)
            continue
        if before is not None:
            (places.put_or_share if plan.carried else places.share)(before)
        places.put(part, part.length)
    keys = torch.tensor([0, *(plan.keys(part) for part in plan.segments)]).cumsum(0)
    return Lengths(
        sent(torch.tensor([0, *(part.stop for part in plan.segments)], dtype=torch.int32), plan.device),
        sent(keys.to(torch.int32), plan.device),
        max(part.length for part in plan.segments),
        plan.longest,
        places.gather(plan, plan.key_tokens),
    )


def why_not(query: Tensor, value: Tensor, rules: Rules) -> str | None:
    """What keeps all of these kernels from a call; None if nothing does."""
    dim, target = query.shape[-1], target_of(query)
    reasons = {
        "a CUDA device": target.kind == "cuda",
        "float16 or bfloat16": query.dtype in (torch.float16, torch.bfloat16),
        "heads of a width that is a multiple of 8 and at most 256, and values no wider": (
            value.shape[-1] <= dim <= 256 and dim % 8 == 0
        ),
        "no sinks": rules.sinks is None,
        "no chunks": rules.sight.chunk is None,
        "no biases": rules.bias is None,
        "no dropout": rules.dropout == 0.0,
    }
    missing = next((reason for reason, met in reasons.items() if not met), None)
    if missing is None and target.capability < (8, 0):
        missing = "a GPU of compute capability 8.0 or above"
    return missing and f"needs {missing}"


# -- flash-attn ---------------------------------------------------------------------------------------------------


@functools.cache
def flash2_kernel() -> Callable | None:
    """The one of flash-attn 2; None where it is not installed."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        return None
    return flash_attn_varlen_func


@functools.cache
def flash3_kernel() -> Callable | None:
    """The one of flash-attn 3; None where it is not installed."""
    try:
        from flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        return None
    return flash_attn_varlen_func


def why_not_flash2(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> str | None:
    return why_not(query, value, rules) or (None if flash2_kernel() else "needs flash-attn 2 (pip install flash-attn)")


def why_not_flash3(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> str | None:
    if reason := why_not(query, value, rules):
        return reason
    if target_of(query).capability[0] != 9:
        return "needs a GPU of compute capability 9"
    return None if flash3_kernel() else "needs flash-attn 3 (flash_attn_interface)"


@of_one_width
def flash2_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """As `varlen_attention`, by flash-attn 2."""
    return _flash(flash2_kernel(), query, key, value, plan, rules)


@of_one_width
def flash3_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """As `varlen_attention`, by flash-attn 3."""
    return _flash(flash3_kernel(), query, key, value, plan, rules)


def _flash(
    kernel: Callable | None, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules
) -> Tensor:
    assert kernel is not None
    shape = lengths(plan)
    out = kernel(
        query,
        gathered(key, shape.gather),
        gathered(value, shape.gather),
        *shape[:4],
        softmax_scale=rules.scale,
        causal=rules.causal,
        window_size=_window(rules),
        softcap=rules.softcap or 0.0,
    )
    return out[0] if isinstance(out, tuple) else out  # the first releases of flash-attn 3 return the lse as well


def _window(rules: Rules) -> tuple[int, int]:
    """(keys before the query's own, keys after it); -1 for all."""
    side = -1 if rules.sight.window is None else rules.sight.window - 1
    return (side, 0 if rules.causal else side)


# -- torch's own --------------------------------------------------------------------------------------------------


def why_not_varlen(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> str | None:
    return why_not(query, value, rules) or ("needs no soft-cap" if rules.softcap is not None else None)


@of_one_width
def torch_varlen_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """As `varlen_attention`, by `torch.nn.attention.varlen`."""
    from torch.nn.attention.varlen import varlen_attn

    shape = lengths(plan)
    key, value = gathered(key, shape.gather), gathered(value, shape.gather)
    shares = query.shape[1] > key.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if shares else {}  # torch 2.11's kernel takes shared keys unasked
    out = varlen_attn(query, key, value, *shape[:4], scale=rules.scale, window_size=_window(rules), **options)
    assert isinstance(out, Tensor)
    return out
