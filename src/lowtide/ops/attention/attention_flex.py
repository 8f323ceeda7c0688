"""Ragged attention by flex attention on CUDA, for the rules that no other kernel knows: soft-caps, sinks, chunks.

Whatever the rules, the keys that a token sees are two runs of tokens: some of its own segment up to itself, and some
of its prefix. So a mask is four numbers a token, windows and chunks are data rather than code, one compiled kernel
serves all layers, and prefixes are seen where they lie. Which blocks of the kernel see one another follows from the
same runs, without a mask of tokens x tokens (arXiv 2412.05496 for the kernel and its blocks).

A sink is a key without a value, so it scales what the others give by their share of the softmax:
`sigmoid(lse - sink)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from lowtide.compat.torch import compiler_options
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules, Sight
from lowtide.ops.target import has_triton, target_of

BLOCK = 128
"""Queries, and keys, of a block of the mask; what flex attention's kernels are tuned for."""
NARROWEST = 16
"""Width of a head; below it the kernel's products do not compile."""
COMPILATION = {"recompile_limit": 64, "specialize_float": True}
"""The kernel is compiled anew with and without gradients or sinks, for other dtypes, head counts and soft-caps; scale
and soft-cap are constants in it."""

KERNEL = FlexKernelOptions(BACKEND="TRITON")
"""Of fewer than 128 queries torch would make a decoding step, whose kernel takes no mask of blocks that are smaller
than the query heads of a key head together."""


class Seen(NamedTuple):
    """The keys that each token sees: [own, itself] of its own segment and [before, beyond) of its prefix."""

    own: Int[Tensor, " tokens"]
    before: Int[Tensor, " tokens"]
    beyond: Int[Tensor, " tokens"]


def why_not_flex(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> str | None:
    """What keeps flex attention from a call; None if nothing does."""
    target = target_of(query)
    if target.kind != "cuda":
        return "needs a CUDA device"
    if query.dtype == torch.float64 or rules.dropout > 0 or not rules.causal:
        return "needs at most float32, no dropout, and causal segments"
    if rules.bias is not None:
        return "needs scores without biases"
    if rules.softcap is None and rules.sinks is None and rules.sight == Sight():
        return "needs more than plain attention, which others do without being compiled first"
    if not (target.planned or has_triton()):
        return "needs triton"
    if min(query.shape[-1], value.shape[-1]) < NARROWEST:
        return f"needs heads of a width of at least {NARROWEST}"
    if target.capability < (8, 0):
        return "needs a GPU of compute capability 8.0 or above"
    return None


def flex_ragged_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """As `varlen_attention`. On a CPU it is not compiled, which only serves to test it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    attend = _compiled() if query.is_cuda else flex_attention
    with compiler_options(COMPILATION):
        out, more = attend(
            q,
            k,
            v,
            score_mod=None if rules.softcap is None else _softcap(rules.softcap),
            block_mask=block_mask(plan, rules.sight),
            scale=rules.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=rules.sinks is not None),
            kernel_options=KERNEL,
        )
    out = out[0].transpose(0, 1)
    if rules.sinks is None:
        return out
    assert more.lse is not None
    lse = more.lse[0].transpose(0, 1)
    return out * torch.sigmoid(lse - rules.sinks.to(lse.dtype)).to(out.dtype)[..., None]


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Were it not the full graph, running out of compilations would silently write out all scores.
    return torch.compile(flex_attention, fullgraph=True, dynamic=True)


@functools.cache
def _softcap(softcap: float) -> Callable[..., Tensor]:
    @no_type_check
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


# -- the mask -----------------------------------------------------------------------------------------------------


def block_mask(plan: AttentionPlan, sight: Sight) -> BlockMask:
    """The mask of a batch; made once for each sight that its layers have."""
    return plan.once(("flex", sight), lambda: _block_mask(plan, sight))


def _block_mask(plan: AttentionPlan, sight: Sight) -> BlockMask:
    seen = seen_keys(plan, sight)
    some, full = _blocks(seen, plan.key_tokens)
    own, before, beyond = (run.to(plan.device, torch.int32) for run in seen)

    @no_type_check
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((k >= own[q]) & (k <= q)) | ((k >= before[q]) & (k < beyond[q]))

    mask = BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(plan.tokens, plan.key_tokens),
    )
    return mask.to(plan.device)


def seen_keys(plan: AttentionPlan, sight: Sight) -> Seen:
    """From host integers, on the host."""
    parts = plan.segments
    befores = [plan.before(part) for part in parts]
    rows = [
        (part.start, b.start, b.length) if b else (part.start, 0, 0) for part, b in zip(parts, befores, strict=True)
    ]
    each = torch.tensor([part.length for part in parts])
    start, prefix, ahead = torch.tensor(rows).repeat_interleave(each, dim=0).unbind(1)
    position = torch.arange(plan.tokens) - start + ahead
    first = torch.zeros_like(position)
    if sight.window is not None:
        first = position - sight.window + 1
    if sight.chunk is not None:
        first = torch.maximum(first, position // sight.chunk * sight.chunk)
    return Seen(start + (first - ahead).clamp(min=0), prefix + first.clamp(min=0).minimum(ahead), prefix + ahead)


def _blocks(seen: Seen, keys: int) -> tuple[Tensor, Tensor]:
    """[blocks, blocks] bool: pairs of a query block and a key block with some pair of tokens seen, with all."""
    tokens = torch.arange(len(seen.own))
    count = -(-keys // BLOCK)
    some, full = torch.zeros(2, -(-len(tokens) // BLOCK), count + 1, dtype=torch.int32)
    for start, stop in ((seen.own, tokens + 1), (seen.before, seen.beyond)):
        touched = start // BLOCK, torch.where(stop > start, -(-stop // BLOCK), start // BLOCK)
        whole = -(-start // BLOCK), stop // BLOCK
        for tally, (first, last) in ((some, touched), (full, whole)):
            # Counts of queries that see a key block: +1 where their run begins, -1 where it ends, summed up below.
            one = (last > first).to(tally.dtype)
            tally.index_put_((tokens // BLOCK, first), one, accumulate=True)
            tally.index_put_((tokens // BLOCK, last), -one, accumulate=True)
    some, full = (tally.cumsum(1)[:, :count] for tally in (some, full))
    return some > 0, full == BLOCK


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each query block how many key blocks, and which: [1, 1, blocks] and [1, 1, blocks, blocks]."""
    order = blocks.to(torch.int32).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
