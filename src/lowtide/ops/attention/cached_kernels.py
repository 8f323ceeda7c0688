"""What a decode step does on both sides of its attention to keys that are held from before.

Before it, queries and keys are turned by their positions, new keys and values go where they are kept, and queries that
read the same prompt are put side by side. After it, what a token gathered of its prompt is merged with what it gathered
of its completion. On CUDA each side is one Triton kernel (`cached_triton`); elsewhere its plain twin computes the same.

Shapes: `rows` are heads of new tokens, token by token; `grouped` ones are those that read a prompt's keys side by side,
with rows that nobody reads where prompts have unlike numbers of completions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ops.attention.cached_attention import Rotary
from lowtide.ops.layers import layer_kernels
from lowtide.ops.layers.layer_kernels import next_power, rotate_
from lowtide.ops.trials import computes, is_right

ROWS = 16
"""Of a program that merges."""
TOLERANCE = 0.1
"""Of bfloat16, from numbers of a normal distribution: some three times what it rounds."""
Heads = tuple[
    Float[Tensor, "tokens heads dim"], Float[Tensor, "tokens kv_heads dim"], Float[Tensor, "tokens kv_heads value_dim"]
]
"""Queries, keys and values."""
Gathered = tuple[Float[Tensor, "grouped value_dim"], Float[Tensor, " grouped"]]
"""What grouped queries gathered, and the log-sum-exps of their scores."""
MODULE = "lowtide.ops.attention.cached_triton"


class Grouping(NamedTuple):
    """Which queries stand side by side."""

    source: Int[Tensor, " grouped"]
    """The row that is there."""
    place: Int[Tensor, " rows"]
    """Where a row is."""


class Kept(NamedTuple):
    """Where keys and values are kept, in places seen as one after the other."""

    keys: Float[Tensor, "places dim"]
    values: Float[Tensor, "places value_dim"]


def serves(x: Tensor) -> bool:
    """Whether kernels compute on a tensor: see `trials.computes`."""
    return computes(x, right_on)


def turn_and_keep(
    heads: Heads, rotary: Rotary | None, kept: Kept, places: Int[Tensor, " kv_rows"], grouping: Grouping
) -> tuple[Float[Tensor, "tokens heads dim"], Float[Tensor, "grouped dim"]]:
    """Keeps keys and values of new tokens.

    Args:
        heads: queries, keys and values, of which the first two may be written over.
        rotary: by which they are turned first, as `rotate_` does it; None: they are turned.
        places: where each head of a new key goes.
        grouping: of the queries.

    Returns:
        the queries, turned, as they were and grouped.
    """
    by = _keep_by_kernel if serves(heads[0]) else _keep_by_torch
    return by(heads, rotary, kept, places, grouping)


def _keep_by_torch(
    heads: Heads, rotary: Rotary | None, kept: Kept, places: Tensor, grouping: Grouping
) -> tuple[Tensor, Tensor]:
    query, key, value = heads
    if rotary is not None:
        rotate_(query, key, *rotary)
    for into, new in zip(kept, (key, value), strict=True):
        into.index_copy_(0, places, new.reshape(-1, new.shape[-1]))
    return query, query.reshape(-1, query.shape[-1]).index_select(0, grouping.source)


def _keep_by_kernel(
    heads: Heads, rotary: Rotary | None, kept: Kept, places: Tensor, grouping: Grouping
) -> tuple[Tensor, Tensor]:
    query, key, value = heads
    (tokens, count, dim), (_, kv_heads, value_dim) = query.shape, value.shape
    turned = query if rotary is None else torch.empty_like(query, memory_format=torch.contiguous_format)
    grouped = query.new_empty(len(grouping.source), dim)
    cos, sin = rotary or (query, query)  # of the latter nothing is read
    layer_kernels.launch(
        "turn_and_keep", (tokens,), (cos, sin, query, key, value, places, grouping.place),
        (grouped if rotary is None else turned, grouped, *kept), module=MODULE, heads=count, kv_heads=kv_heads,
        dim=dim, value_dim=value_dim, half=cos.shape[-1] // 2, TURNS=rotary is not None, HEADS=next_power(count),
        KV_HEADS=next_power(kv_heads), DIM=next_power(dim), VALUE_DIM=next_power(value_dim),
    )  # fmt: skip
    return turned, grouped


def merge_rows(
    out: Float[Tensor, "rows value_dim"], lse: Float[Tensor, " rows"], others: Gathered, grouping: Grouping
) -> Float[Tensor, "rows value_dim"]:
    """What rows gather from both parts of their keys together: see `cached_attention.merged`.

    Args:
        out: what they gathered of the one, which may be written over.
        lse: the log-sum-exps of their scores there.
        others: likewise of the other, grouped.
    """
    return (_merge_by_kernel if serves(out) else _merge_by_torch)(out, lse, others, grouping)


def _merge_by_torch(out: Tensor, lse: Tensor, others: Gathered, grouping: Grouping) -> Tensor:
    other, other_lse = (each.index_select(0, grouping.place) for each in others)
    return torch.lerp(out, other, torch.sigmoid(other_lse - lse).to(out.dtype)[:, None])


def _merge_by_kernel(out: Tensor, lse: Tensor, others: Gathered, grouping: Grouping) -> Tensor:
    rows, dim = out.shape
    layer_kernels.launch(
        "merge", (-(-rows // ROWS),), (lse, grouping.place, *others), (out,), module=MODULE, count=rows, dim=dim,
        ROWS=ROWS, DIM=next_power(dim),
    )  # fmt: skip
    return out


@functools.cache
def right_on(device: torch.device) -> bool:
    """Whether the kernels give what their plain twins give; says so if not."""

    def trial() -> Iterable[tuple[Tensor, Tensor]]:
        return zip(*(_tried(device, *each) for each in ((_keep_by_kernel, _merge_by_kernel), TWINS)), strict=True)

    return is_right(trial, TOLERANCE, f"generation runs by torch's operations around attention on {device}")


TWINS = _keep_by_torch, _merge_by_torch


def _tried(device: torch.device, keep: Callable[..., Any], merge: Callable[..., Any]) -> list[Tensor]:
    """What comes of a few numbers."""
    (tokens, heads, kv_heads, dim), generator = (3, 4, 2, 64), torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    rows, order = tokens * heads, torch.randperm(tokens * heads, generator=generator)
    query, key, value = (random(tokens, n, dim) for n in (heads, kv_heads, kv_heads))
    rotary, kept = (random(tokens, dim), random(tokens, dim)), Kept(random(20, dim), random(20, dim))
    grouping = Grouping(order.to(device), order.argsort().to(device))
    places = (torch.arange(tokens * kv_heads) * 3 + 1).to(device)
    turned, grouped = keep((query, key, value), rotary, kept, places, grouping)
    lse, other_lse = random(rows).float(), random(rows).float()
    return [turned, grouped, *kept, merge(random(rows, dim), lse, (random(rows, dim), other_lse), grouping)]
