"""What a CUDA device would allocate, on tensors without memory that lie on a CPU.

A plan traces the real step. torch without CUDA has no autograd for CUDA tensors, not even for fake ones, so the trace
runs on fake CPU tensors, and within `as_on` the code chooses and allocates as it would on the device:

- kernels and workspaces of `lowtide.ops` are those of the device (`ops.target`): attention by torch's `varlen_attn`,
  which allocates what flash-attn's do, or by what stands for flex attention; the head's rows by the Triton kernels, of
  which only the allocations happen;
- `scaled_dot_product_attention` takes the kernel that torch would choose there;
- buffers that a kernel takes inside itself, where no trace sees them, are taken around it (`WORKSPACES`);
- autocast computes in float32 what CUDA's does;
- optimizers prefer their `foreach` form, which has temporaries for all parameters at once.

It changes torch for the whole process while it lasts, so nothing else may compute meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, library

from lowtide.compat.torch import attention_by, foreach_by_default, grouped_products_by
from lowtide.ops.attention.attention_flex import why_not_flex
from lowtide.ops.attention.varlen_attention import BACKENDS, Backend
from lowtide.ops.layers import layer_kernels
from lowtide.ops.logits.triton_rows import TritonRows
from lowtide.ops.target import planning_for
from lowtide.planner.devices import Device
from lowtide.planner.tracing.substitutes.cuda_attention import flex, sdpa
from lowtide.planner.tracing.substitutes.cuda_autocast import cuda_autocast
from lowtide.planner.tracing.trace import StorageTrace


@contextlib.contextmanager
def as_on(device: Device, trace: StorageTrace | None = None) -> Iterator[None]:
    """While it lasts, what runs on fake CPU tensors allocates as on a device.

    To be entered last, within the fake mode and the trace, so that the trace sees what is allocated here.

    Args:
        device: the device.
        trace: sees the buffers that kernels take inside themselves; without one nobody asks for them.
    """
    if device.kind != "cuda":
        with grouped_products_by(_grouped_product):
            yield
        return
    capability = device.capability or (0, 0)
    # torch's own kernel stands for flash-attn's
    backends = {"varlen": BACKENDS["varlen"], "flex": Backend(flex, why_not_flex), "grouped": BACKENDS["grouped"]}
    with (
        grouped_products_by(_grouped_product),
        planning_for("cuda", capability),
        patch.dict(BACKENDS, backends, clear=True),
        attention_by(functools.partial(sdpa, capability)),
        patch.object(TritonRows, "launch", _pass_over_rows),
        patch.object(layer_kernels, "launch", pass_over_layer),
        cuda_autocast(),
        foreach_by_default(),
        contextlib.nullcontext() if trace is None else trace.taking_around(WORKSPACES),
    ):
        yield


def _pass_over_rows(rows: TritonRows, kernel: str, *_: Any, **_flags: Any) -> None:
    """What a kernel of the head reads and writes, for those who count it: no operation shows it."""
    if kernel == "stats":
        rows.logits.amax(-1)
    else:
        rows.logits.mul_(1)


_layer_kernel = library.custom_op(
    "lowtide::layer_kernel",
    lambda *_: None,
    mutates_args=("written",),
    schema="(Tensor[] read, Tensor(a!)[] written) -> ()",
)
_layer_kernel.register_fake(lambda *_: None)


def pass_over_layer(
    _kernel: str, _grid: Sequence[int], read: Sequence[Tensor], written: Sequence[Tensor], **_: Any
) -> None:
    """One operation that reads and writes what a kernel of a layer does."""
    _layer_kernel(list(read), list(written))


# -- what kernels take inside themselves --------------------------------------------------------------------------


def _flash_backward(*args: Any, **_options: Any) -> list[Tensor]:
    """Flash attention's backward (`mha_varlen_bwd` of flash-attn 2): sums in float32, and each query head's own
    gradients of the keys and values that several share.

    Arguments as the operation takes them: gradient, query, key, value, output, log-sum-exp, starts of the segments.
    """
    _, query, key, _, _, _, starts = args[:7]
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


def _sorted_indices(into: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *_: Any) -> list[Tensor]:
    """Sums into rows sort their indices first (`index_put_with_sort_kernel` of `cuda/Indexing.cu`): five lists."""
    (index,) = indices if len(indices) == 1 else (None,)
    return [index.new_empty(5, index.numel(), dtype=torch.int64)] if accumulate and index is not None else []


WORKSPACES: dict[str, Callable[..., list[Tensor]]] = {
    "torch_attn::_varlen_attn_backward": _flash_backward,
    "lowtide::flex_attention_backward": _flex_sums,
    "aten::index_put_": _sorted_indices,
}
"""By operation, the buffers that it takes and frees again, from its arguments."""


# -- experts ------------------------------------------------------------------------------------------------------


def _grouped_product(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Groups are a dimension of their own, or lie end to end along one that ends at `offs`."""
    shape = [one.shape[-2], other.shape[-1]]
    if one.dim() == other.dim():
        groups = one.shape[0] if one.dim() == 3 or offs is None else offs.shape[0]
        shape.insert(0, groups)
    return one.new_empty(shape, dtype=out_dtype)
