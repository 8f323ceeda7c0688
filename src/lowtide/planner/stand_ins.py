"""What a CUDA device would allocate, on tensors without memory that lie on a CPU.

A plan traces the real step. torch without CUDA has no autograd for CUDA tensors, not even for fake ones, so the trace
runs on fake CPU tensors, and within `as_on` the code chooses and allocates as it would on the device:

- kernels and workspaces of `lowtide.ops` are those of the device (`ops.target`): attention by `varlen_attn`, whose
  own description for fake tensors serves, flex attention by a stand-in, the head's rows by Triton, of which only the
  allocations happen;
- `scaled_dot_product_attention` takes the kernel that torch would choose there, not the CPU's;
- buffers that a kernel takes inside itself, where no trace sees them, are taken around it (`WORKSPACES`);
- autocast computes in float32 what CUDA's autocast does and a CPU's does not;
- optimizers prefer their `foreach` form, which has temporaries for all parameters at once.

Enter it last, within the fake mode and the trace, so that the trace sees what it allocates.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.ops.attention_flex import BLOCK, why_not_flex
from lowtide.ops.attention_plan import AttentionPlan, Rules
from lowtide.ops.target import planning_for
from lowtide.ops.triton_rows import TritonRows
from lowtide.ops.varlen_attention import BACKENDS, Backend
from lowtide.planner.devices import Device

HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def as_on(device: Device) -> Iterator[None]:
    """While it lasts, what runs on fake CPU tensors allocates as on a device; for a CPU nothing changes."""
    if device.kind != "cuda":
        yield
        return
    capability = device.capability or (0, 0)
    with (
        planning_for("cuda", capability),
        _attention_backends(),
        _replaced(F, "scaled_dot_product_attention", functools.partial(sdpa, capability)),
        _replaced(TritonRows, "_launch", _pass_over_rows),
        _cuda_autocast(),
        _foreach_by_default(),
        _Workspaces(),
    ):
        yield


# -- attention ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _attention_backends() -> Iterator[None]:
    """torch's own kernel stands for flash-attn's, which allocate the same."""
    before = dict(BACKENDS)
    planned = {"varlen": before["varlen"], "flex": Backend(_flex, why_not_flex), "grouped": before["grouped"]}
    _refill(BACKENDS, planned)
    try:
        yield
    finally:
        _refill(BACKENDS, before)


def _refill(table: dict[str, Any], entries: dict[str, Any]) -> None:
    table.clear()
    table.update(entries)


def _flex(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """The allocations of compiled flex attention, as `attention_flex.flex_ragged_attention` calls it."""
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


_flex_forward = torch.library.custom_op(
    "lowtide::flex_attention",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, int keys) -> (Tensor, Tensor)",
)
_flex_backward = torch.library.custom_op(
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
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernel that torch chooses on CUDA.

    Flash attention where it can, then memory-efficient attention, which knows no grouped heads, then the computation
    in the open, with all its scores (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
    """
    if torch.is_autocast_enabled("cpu") and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    aten, ampere = torch.ops.aten, capability >= (8, 0)
    dim, one_width = query.shape[-1], query.shape[-1] == value.shape[-1]
    grouped = query.shape[1] != key.shape[1]
    if attn_mask is None and query.dtype in HALF and ampere and one_width and dim % 8 == 0 and dim <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    known = query.dtype in (torch.float16, torch.float32) or (query.dtype == torch.bfloat16 and ampere)
    if known and not grouped:
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
        training = torch.is_grad_enabled()
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, training, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


# -- what kernels take inside themselves --------------------------------------------------------------------------


def _flash_backward(_grad: Tensor, query: Tensor, key: Tensor, _value: Tensor, _out: Tensor, _lse: Tensor,
                    starts: Tensor, *_more: Any, **_options: Any) -> list[Tensor]:  # fmt: skip
    """Flash attention's backward (`mha_varlen_bwd` of flash-attn 2): sums in float32, and each query head's own
    gradients of the keys and values that several share."""
    tokens, heads, dim = query.shape
    padded = tokens + 128 * (starts.shape[0] - 1)
    buffers = [
        query.new_empty(heads, padded, dtype=torch.float32),
        query.new_empty(padded, heads, -(-dim // 32) * 32, dtype=torch.float32),
    ]
    if key.shape[1] != heads:
        buffers += [key.new_empty(key.shape[0], heads, dim) for _ in range(2)]
    return buffers


def _flex_sums(_grad: Tensor, _query: Tensor, _key: Tensor, _value: Tensor, _out: Tensor, lse: Tensor,
               _keys: int) -> list[Tensor]:  # fmt: skip
    """Flex attention's: the products of output and gradient, summed over a head's width."""
    return [torch.empty_like(lse)]


WORKSPACES: dict[str, Callable[..., list[Tensor]]] = {
    "torch_attn::_varlen_attn_backward": _flash_backward,
    "lowtide::flex_attention_backward": _flex_sums,
}
"""By operation, the buffers that it takes and frees again, from its arguments."""


class _Workspaces(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        allocate = WORKSPACES.get(func.name())
        held = allocate(*args, **kwargs) if allocate else None
        out = func(*args, **kwargs)
        del held
        return out


# -- the head -----------------------------------------------------------------------------------------------------


def _pass_over_rows(rows: TritonRows, kernel: str, *_: Any, **_flags: Any) -> None:
    """What a kernel reads and writes, for those who count it: no operation shows it."""
    if kernel == "stats":
        rows.logits.amax(-1)
    else:
        rows.logits.mul_(1)


# -- precision ----------------------------------------------------------------------------------------------------

CAST_TO_FLOAT32 = (
    "layer_norm", "group_norm", "cosine_similarity", "norm.Scalar", "norm.ScalarOpt_dim", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "log10",
    "softplus", "logsumexp",
)  # fmt: skip
"""What autocast computes from float32 copies on CUDA, and as it comes on a CPU (`aten/src/ATen/autocast_mode.h`)."""
GIVEN_IN_FLOAT32 = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod")
"""What it gives a float32 result without such a copy."""


@contextlib.contextmanager
def _cuda_autocast() -> Iterator[None]:
    """Autocast of a CPU has CUDA's rules, in backward too, where checkpointed layers run again."""
    library = torch.library.Library("aten", "IMPL")
    for names, kernel in ((CAST_TO_FLOAT32, _cast), (GIVEN_IN_FLOAT32, _given)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, functools.partial(kernel, op), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _cast(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _beneath_autocast():
        return op(*map(_in_float32, args), **{name: _in_float32(each) for name, each in kwargs.items()})


def _given(op: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_half(tensor) and kwargs.get("dtype") is None and not any(isinstance(each, torch.dtype) for each in args):
        kwargs["dtype"] = torch.float32
    with _beneath_autocast():
        return op(tensor, *args, **kwargs)


def _beneath_autocast() -> Any:
    key: Any = torch._C.DispatchKey
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key.AutocastCPU))


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF


def _in_float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


# -- optimizers ---------------------------------------------------------------------------------------------------

CHOICE = "_default_to_fused_or_foreach"
"""The name under which the modules of `torch.optim` know the function that chooses an implementation."""


@contextlib.contextmanager
def _foreach_by_default() -> Iterator[None]:
    modules = [each for name, each in sys.modules.items() if name.startswith("torch.optim.") and hasattr(each, CHOICE)]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_replaced(module, CHOICE, _foreach_or_fused))
        yield


def _foreach_or_fused(params: object, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
    """(fused, foreach)"""
    return (use_fused, not use_fused)


@contextlib.contextmanager
def _replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
