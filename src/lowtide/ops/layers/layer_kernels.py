"""What a decoder layer computes between its products: norms, rotary embeddings, gates; forward and backward.

On CUDA each is one Triton kernel (`layer_triton`), which reads and writes once and computes in float32 inside.
Elsewhere its plain twin computes the same in as few passes over memory as torch's own operations allow. RMSNorm is
arXiv 1910.07467, rotary embeddings are arXiv 2104.09864, gates of SiLU and of GELU are arXiv 2002.05202.

Every launch goes through `launch`, so that a plan of memory, on tensors without memory, can see it.

Shapes: `rows` of a norm are tokens, or heads of tokens; `width` is what it is over.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lowtide.compat.torch import FakeTensor
from lowtide.ops.target import target_of

PROGRAMS = 512
"""Of the kernel that sums the gradient of a norm's weight, at most: each sums some rows by itself."""
BLOCK = 1024
"""Entries that a program of the gate's kernels has."""


Activation = Literal["silu", "gelu_tanh"]
"""Of a gate; that of GELU is its approximation by tanh."""


class Norm(NamedTuple):
    """A root mean square norm."""

    weight: Float[Tensor, " width"]
    eps: float
    offset: float = 0.0
    """What is added to the weight before it multiplies: 1 in Gemma's norms, else 0."""

    @property
    def factor(self) -> Float[Tensor, " width"]:
        """By what normed rows are multiplied."""
        return self.weight + self.offset if self.offset else self.weight


def uses_kernels(x: Tensor) -> bool:
    """Whether Triton's kernels compute on a tensor; where a plan is made for CUDA too."""
    return target_of(x).kind == "cuda"


def launch(
    kernel: str,
    grid: Sequence[int],
    read: Sequence[Tensor],
    written: Sequence[Tensor],
    module: str = "lowtide.ops.layers.layer_triton",
    **values: Any,
) -> None:
    """Runs a kernel.

    Args:
        kernel: its name.
        grid: of programs.
        read: its first arguments, of any strides.
        written: those after them, contiguous; what is read too stands here alone.
        module: that has it, which is imported where it runs.
        values: the others, by name.
    """
    first = written[0]
    if isinstance(first, FakeTensor) or first.is_meta:
        return  # a plan: what was allocated is all there is to see
    kernels = importlib.import_module(module)
    whole = (each.contiguous() for each in read)  # a gradient of a sum may be one number, expanded
    with torch.cuda.device_of(first):
        getattr(kernels, kernel)[tuple(grid)](*whole, *written, **values)


# -- norms --------------------------------------------------------------------------------------------------------


def rms_norm(
    x: Float[Tensor, "rows width"], norm: Norm, dtype: torch.dtype
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, " rows"]]:
    """The normed rows in a dtype, and by what each was multiplied, in float32 at least."""
    rows, width = x.shape
    if uses_kernels(x):
        out, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
        launch("rms_norm", (rows,), (x, norm.weight), (out, scale), width=width, eps=norm.eps, offset=norm.offset,
               BLOCK=next_power(width), num_warps=warps_of(width))  # fmt: skip
        return out, scale
    size = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    scale = size.square_().div_(width).add_(norm.eps).rsqrt_()
    out = torch.mul(x, scale[:, None]).mul_(norm.factor)
    return (out if out.dtype == dtype else out.to(dtype)), scale


def rms_norm_backward(
    grad: Float[Tensor, "rows width"],
    x: Float[Tensor, "rows width"],
    scale: Float[Tensor, " rows"],
    norm: Norm,
    add: Float[Tensor, "rows width"] | None = None,
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, " width"] | None]:
    """The gradients of a norm.

    Args:
        grad: at its output.
        x: its input.
        scale: as `rms_norm` gave it.
        add: is added to the gradient at the input.

    Returns:
        the gradient at the input, in its dtype, and that of the weight, where one is wanted.
    """
    trained = norm.weight.requires_grad
    if uses_kernels(x):
        return _launch_backward(grad, x, scale, norm, add)
    slopes = torch.mul(grad, norm.factor) if grad.dtype == scale.dtype else grad.to(scale.dtype).mul_(norm.factor)
    along = torch.linalg.vecdot(slopes, x.to(slopes.dtype))
    of_weight = torch.mul(grad, x).mul_(scale[:, None]).sum(0, dtype=scale.dtype) if trained else None
    out = slopes.mul_(scale[:, None])
    out.addcmul_(x, along.mul_(scale**3).div_(-x.shape[1])[:, None])
    if add is not None:
        out.add_(add)
    return out.to(x.dtype), None if of_weight is None else of_weight.to(norm.weight.dtype)


def _launch_backward(
    grad: Tensor, x: Tensor, scale: Tensor, norm: Norm, add: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    rows, width = x.shape
    trained, out = norm.weight.requires_grad, torch.empty_like(x)
    programs = min(rows, PROGRAMS) if trained else rows
    sums = x.new_empty(programs if trained else 0, width, dtype=torch.float32)
    launch("rms_norm_backward", (programs,), (grad, x, scale, norm.weight, x if add is None else add), (out, sums),
           rows=rows, width=width, offset=norm.offset, ADD=add is not None, TRAINED=trained,
           BLOCK=next_power(width), num_warps=warps_of(width))  # fmt: skip
    return out, sums.sum(0).to(norm.weight.dtype) if trained else None


# -- rotary embeddings --------------------------------------------------------------------------------------------


def rotate_(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens kv_heads dim"],
    cos: Float[Tensor, "tokens turned"],
    sin: Float[Tensor, "tokens turned"],
    *,
    back: bool = False,
) -> None:
    """Turns queries and keys by their positions in place, half of a head's width with the other half, as transformers'
    `rotate_half` has them; of a wider head its first entries, as wide as cosines and sines are.

    Args:
        back: whether they are gradients at what was turned, and become those before it.
    """
    if uses_kernels(query):
        (tokens, heads, dim), kv_heads, half = query.shape, key.shape[1], cos.shape[1] // 2
        launch("rotate", (tokens,), (cos, sin), (query, key), heads=heads, kv_heads=kv_heads, dim=dim, half=half,
               BACK=back, HEADS=next_power(heads), KV_HEADS=next_power(kv_heads), HALF=next_power(half))  # fmt: skip
        return
    wide, turned = torch.promote_types(query.dtype, torch.float32), cos.shape[1]
    (cos1, cos2), (sin1, sin2) = (each.to(wide)[:, None].chunk(2, -1) for each in (cos, sin))
    sin1, sin2 = (sin2, sin1) if back else (sin1, sin2)
    for x in (query, key):
        x = x if x.shape[-1] == turned else x[..., :turned]
        _rotate(x, x.to(wide), (cos1, cos2), (sin1, sin2), 1 if back else -1)


def _rotate(x: Tensor, turned: Tensor, cos: Sequence[Tensor], sin: Sequence[Tensor], sign: int) -> None:
    one, two = turned.chunk(2, -1)
    crossed = one * sin[1]
    one.mul_(cos[0]).addcmul_(two, sin[0], value=sign)
    two.mul_(cos[1]).sub_(crossed, alpha=sign)
    if turned is not x:
        x.copy_(turned)


# -- gates --------------------------------------------------------------------------------------------------------


def gate_product(
    gate: Float[Tensor, "tokens inner"], up: Float[Tensor, "tokens inner"], activation: Activation
) -> Float[Tensor, "tokens inner"]:
    """`activation(gate) * up`."""
    if uses_kernels(gate):
        out = torch.empty_like(gate)
        launch("gate_product", _blocks(gate), (gate, up), (out,), count=gate.numel(), TANH=activation != "silu",
               BLOCK=BLOCK)  # fmt: skip
        return out
    return _active(gate, activation).mul_(up)


def gate_backward_(
    grad: Float[Tensor, "tokens inner"],
    gate: Float[Tensor, "tokens inner"],
    up: Float[Tensor, "tokens inner"],
    activation: Activation,
) -> None:
    """In place: the gradient becomes what `gate_product` gives, gate and up become their gradients."""
    if uses_kernels(gate):
        launch("gate_backward", _blocks(gate), (), (grad, gate, up), count=gate.numel(), TANH=activation != "silu",
               BLOCK=BLOCK)  # fmt: skip
        return
    active = _active(gate, activation)
    slopes = torch.mul(grad, up)
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(slopes, gate, grad_input=gate)
    else:
        torch.ops.aten.gelu_backward.grad_input(slopes, gate, approximate="tanh", grad_input=gate)
    grad.mul_(active)  # the gradient of up
    active.mul_(up)
    up.copy_(grad)
    grad.copy_(active)


def _active(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _blocks(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // BLOCK),)


def next_power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def warps_of(width: int) -> int:
    """Of a program that has a row of such a width."""
    return min(max(next_power(width) // 512, 1), 16)
