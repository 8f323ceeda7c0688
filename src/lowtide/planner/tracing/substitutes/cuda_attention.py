"""Attention as CUDA's kernels allocate it, on tensors without memory that lie on a CPU.

`torch.nn.attention.varlen` describes its own operation for such tensors. Here is what else serves a step on CUDA:
flex attention, which is compiled and shows no operation, and `scaled_dot_product_attention`, for which torch would
choose a CPU's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from lowtide.compat.torch import EFFICIENT_ATTENTION, FLASH_ATTENTION, OPEN_ATTENTION
from lowtide.ops.attention.attention_flex import BLOCK
from lowtide.ops.attention.attention_plan import AttentionPlan, Rules
from lowtide.planner.tracing.substitutes.cuda_autocast import HALF


def flex(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """What compiled flex attention allocates, as `attention_flex.flex_ragged_attention` calls it."""
    blocks = -(-plan.tokens // BLOCK)
    # Which blocks see which, partly and fully, from the queries' side and from the keys'.
    plan.once(("flex", rules.sight), lambda: torch.empty(4, blocks, blocks, dtype=torch.int32))
    # As many keys as make half of all pairs, which is what a causal kernel computes.
    limits = (2 * (rules.sight.window or plan.longest), rules.sight.chunk or plan.longest, plan.longest)
    out, lse = _flex_forward(query, key, value, min(limits))
    if rules.sinks is None:
        return out
    return out * torch.sigmoid(lse.t() - rules.sinks.to(lse.dtype)).to(out.dtype)[..., None]


def _no_kernel(*_: Any) -> Any:
    raise NotImplementedError("this stands for a kernel on tensors without memory")


_flex_forward = library.custom_op(
    "lowtide::flex_attention",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, int keys) -> (Tensor, Tensor)",
)
_flex_backward = library.custom_op(
    "lowtide::flex_attention_backward",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, int keys)"
    " -> (Tensor, Tensor, Tensor)",
)


@_flex_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(tokens, heads, value.shape[2]), query.new_empty(heads, tokens, dtype=torch.float32)


@_flex_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, keys: int) -> tuple:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.keys = inputs
    ctx.save_for_backward(*tensors, *output)


def _flex_gradients(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple:
    return *_flex_backward(grad, *ctx.saved_tensors, ctx.keys), None


_flex_forward.register_autograd(_flex_gradients, setup_context=_keep_for_backward)


def sdpa(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernel that torch chooses on CUDA.

    Flash attention where it can, then memory-efficient attention, which knows no grouped heads, then the computation
    in the open, with all its scores (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
    """
    if torch.is_autocast_enabled("cpu") and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ampere = capability >= (8, 0)
    scale = options.get("scale")
    dim, one_width = query.shape[-1], query.shape[-1] == value.shape[-1]
    grouped = query.shape[1] != key.shape[1]
    if attn_mask is None and query.dtype in HALF and ampere and one_width and dim % 8 == 0 and dim <= 256:
        return FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    known = query.dtype in (torch.float16, torch.float32) or (query.dtype == torch.bfloat16 and ampere)
    if known and not grouped:
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
        training = torch.is_grad_enabled()
        return EFFICIENT_ATTENTION(query, key, value, bias, training, dropout_p, is_causal, scale=scale)[0]
    return OPEN_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
