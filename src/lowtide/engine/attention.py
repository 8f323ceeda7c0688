"""The one attention function that transformers' models call: ragged where there is a plan, dense where there is none.

Registered under the name `lowtide` with transformers' `AttentionInterface`. The plan of the batch travels as a
keyword argument through the model's own forward; the few models that drop unknown ones (stablelm, nemotron) pass
`position_ids` on, to which it is attached as well. A context would not do: with checkpointing, layers run again in
backward. Without a plan (a user's own call) the same function serves the ordinary padded batch. While lowtide
generates, the plan is one of keys that are held from before (`ops.attention.cached_attention`); where ranks split a
batch, it exchanges heads for tokens around the same function (`engine.over_ranks.split_plan`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lowtide.compat.transformers import find_packed_rows_where
from lowtide.engine.encoder_decoder import PairPlan, running
from lowtide.engine.layers.rotary import Run, rows_of, runs_of
from lowtide.engine.over_ranks.split_plan import SplitPlan
from lowtide.ops.attention.attention_plan import NAME, PLAN, AttentionPlan
from lowtide.ops.attention.cached_attention import CachedPlan
from lowtide.ops.attention.layer_attention import asked_by, layer_attention
from lowtide.ragged import RaggedBatch, Segment
from lowtide.ranks.sequence import SequenceParallel

PACKED = "lowtide_flash"
"""The same function for vision towers that pack patches: transformers tells the bounds of their runs to attention whose
name has "flash" in it, and calls any other once for each run."""
OWN_MASK = "its layers choose by a mask of their own which keys a token sees"
"""Of a model that was given no masks, and hands one to its attention: a sparse indexer made it, say. The plan does not
know of it."""
Plan = AttentionPlan | CachedPlan | SplitPlan

_masks_wanted: ContextVar[bool] = ContextVar("masks_wanted", default=True)


@contextlib.contextmanager
def ragged_inputs(
    batch: RaggedBatch, sequence: SequenceParallel | None = None, *, first_position: int = 0
) -> Iterator[dict[str, Any]]:
    """The inputs of a model's forward for a ragged batch; while the context lasts, the model builds no masks.

    Args:
        sequence: the ranks that split the tokens; None where this one runs them all.
        first_position: the number that the model gives to the first position of a row.
    """
    plan, tokens, axes = AttentionPlan.build(batch), batch.token_ids, batch.axis_positions
    if sequence is not None:
        plan = SplitPlan(plan, sequence)
        tokens, axes = tokens[plan.runs], None if axes is None else axes[:, plan.runs]
    with planned_inputs(tokens, plan, first_position=first_position, axes=axes) as inputs:
        yield inputs


@contextlib.contextmanager
def planned_inputs(
    token_ids: Int[Tensor, " tokens"],
    plan: Plan,
    *,
    first_position: int = 0,
    axes: Int[Tensor, "axes tokens"] | None = None,
) -> Iterator[dict[str, Any]]:
    """The inputs of a model's forward whose tokens attend by a plan; while the context lasts, it builds no masks.

    Args:
        first_position: the number that the model gives to the first position of a row.
        axes: positions on several axes, of a model that has them.
    """
    position_ids = plan.positions[None] + first_position if axes is None else axes[:, None]
    setattr(position_ids, PLAN, plan)
    token = _masks_wanted.set(False)
    try:
        with rows_of(_runs(plan)):
            yield {"input_ids": token_ids[None], "position_ids": position_ids, PLAN: plan}
    finally:
        _masks_wanted.reset(token)


def _runs(plan: Plan) -> Callable[[], list[Run]] | None:
    """The rows of a plan's tokens; None while lowtide generates, which no model does whose tables depend on them."""
    if isinstance(plan, CachedPlan):
        return None
    split = isinstance(plan, SplitPlan)
    return functools.partial(runs_of, plan.whole, plan.runs) if split else functools.partial(runs_of, plan)


@contextlib.contextmanager
def pair_inputs(batch: RaggedBatch) -> Iterator[dict[str, Any]]:
    """The inputs of an encoder-decoder's forward for a batch of pairs; while the context lasts, it builds no masks."""
    plan, of_source, of_target = PairPlan.build(batch)
    token = _masks_wanted.set(False)
    try:
        with running(plan):
            input_ids, decoder_input_ids = batch.token_ids[None, of_source], batch.token_ids[None, of_target]
            yield {"input_ids": input_ids, "decoder_input_ids": decoder_input_ids, PLAN: plan}
    finally:
        _masks_wanted.reset(token)


def keep_plan(bounds: Int[Tensor, " runs+1"], on_host: Sequence[int]) -> None:
    """Keeps with the bounds of runs of patches, which travel to each layer of a vision tower, the plan of attention
    within them; the same bounds on the host."""
    runs = enumerate(itertools.pairwise(on_host))
    segments = tuple(Segment(start, stop, -1, number, 0, 0) for number, (start, stop) in runs)
    setattr(bounds, PLAN, AttentionPlan(segments, bounds.new_zeros(on_host[-1])))


@contextlib.contextmanager
def masks_built() -> Iterator[None]:
    """Around a part of a model that has no plan, within `planned_inputs`: it builds its masks as ever."""
    token = _masks_wanted.set(True)
    try:
        yield
    finally:
        _masks_wanted.reset(token)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. `query` [batch, heads, tokens, dim]; `key`, `value` [batch, kv_heads, ..].

    Returns [batch, tokens, heads, dim], and no weights. With a plan the batch is 1 and holds all tokens.
    """
    plan = kwargs.pop(PLAN, None) or getattr(kwargs.get("position_ids"), PLAN, None)
    if (bounds := kwargs.pop("cu_seq_lens_q", None)) is not None and plan is None:
        if not hasattr(bounds, PLAN):  # a user's own call
            keep_plan(bounds, bounds.tolist())
        plan = getattr(bounds, PLAN)
    if plan is None:
        softcap, s_aux = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        return _dense(query, key, value, attention_mask, scaling, dropout, softcap, s_aux), None
    if isinstance(plan, PairPlan):
        plan = plan.of(module)
    elif attention_mask is not None:
        raise ValueError(OWN_MASK)
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        query = query * _temperature_correction(module, plan)
    asked, given = asked_by(module, kwargs, scaling, dropout), key
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if isinstance(plan, SplitPlan):
        if plan.piece is not None:
            plan.piece.meet(module, given)
        return plan.attend(module, query, key, value, asked)[None], None
    return layer_attention(module, query, key, value, plan, asked, whose=given)[None], None


def _temperature_correction(module: Any, plan: Plan) -> Tensor:
    """Llama 4 scales queries by their place in the row; here the row is the batch, the place is the position."""

    def tuned(position: Tensor) -> Tensor:
        return torch.log1p(torch.floor((position.float() + 1) / module.floor_scale)) * module.attn_scale + 1

    positions = plan.positions
    place = torch.arange(len(positions), device=positions.device)
    return (tuned(positions) / tuned(place))[None, None, :, None]


def _dense(query, key, value, mask, scaling, dropout, softcap, sinks) -> Tensor:
    """The ordinary padded form of the variants that `scaled_dot_product_attention` does not know."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        ahead = key.shape[2] - query.shape[2]
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(ahead)
    scores = scores.float()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(query.dtype)
    return (nn.functional.dropout(weights, p=dropout) @ value).transpose(1, 2)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return sdpa_mask(*args, **kwargs) if _masks_wanted.get() else None


find_packed_rows_where(_masks_wanted.get)
for name in (NAME, PACKED):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)
