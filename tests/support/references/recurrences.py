"""The recurrences of transformers' layers by their definition, token by token, in the precision of their inputs.

transformers' own compute in float32 whatever they are given, so that of a model in float64 they are no reference. And
the segments over which the tests of `ops` compute recurrences.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ragged import RaggedBatch

LENGTHS = [5, 1, 8, 3, 12, 4, 2, 1]
PREFIXES: dict[str, list[int | tuple[int, int]]] = {
    "apart": [-1] * len(LENGTHS),
    "shared": [-1, -1, -1, 2, 2, 2, -1, -1],
    "cut": [-1, -1, -1, 2, (2, 3), (2, 4), -1, (2, 1)],
}
"""Cuts lie in the middle of a chunk of 4, at its end, and at the segment's end."""


def plan_of(prefix: list[int | tuple[int, int]]) -> AttentionPlan:
    tokens = [list(range(5, 5 + length)) for length in LENGTHS]
    rows = [0, 1, 2, 2, 2, 2, 2, 2]
    return AttentionPlan.build(RaggedBatch.from_segments(tokens, prefix=prefix, row=rows))


def gradients(out: Tensor, finals: Tensor, given: Sequence[Tensor | None]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in (out, finals)]
    loss = (out * weights[0]).sum() + (finals * weights[1]).sum()
    return list(torch.autograd.grad(loss, [each for each in given if each is not None]))


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **_: Any
) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule`, and `chunk_kimi_delta_attention`, whose `g` has a last dimension for channels."""
    shared = value.shape[2] // key.shape[2]
    query, key = query.repeat_interleave(shared, 2), key.repeat_interleave(shared, 2)
    if use_qk_l2norm_in_kernel:
        query, key = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    decay = (g if g.ndim == 4 else g[..., None]).exp()
    state, outs = value.new_zeros(*key.shape[::2], key.shape[-1], value.shape[-1]), []
    for t in range(value.shape[1]):
        state = state * decay[:, t, :, :, None]
        there = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        new = beta[:, t, :, None] * (value[:, t] - there)
        state = state + key[:, t, :, :, None] * new[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state) / key.shape[-1] ** 0.5)
    return torch.stack(outs, 1), None


def chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **given: Any
) -> Tensor:
    """`mamba2_chunk_scan`."""
    x, groups = hidden_states, hidden_states.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(groups, 2), C.repeat_interleave(groups, 2)
    dt = nn.functional.softplus(dt + given["dt_bias"]).clamp(*given["dt_limit"])
    state, outs = x.new_zeros(*x.shape[::2], x.shape[-1], B.shape[-1]), []
    for t in range(x.shape[1]):
        keep = (A * dt[:, t]).exp()[..., None, None]
        state = state * keep + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + given["D"][:, None] * x[:, t])
    return torch.stack(outs, 1)


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **_: Any,
) -> Tensor:
    """`mamba_selective_scan`: [batch, channels, tokens]."""
    x, dt = hidden_states, nn.functional.softplus(dt + delta_bias[:, None])
    state, outs = x.new_zeros(*x.shape[:2], A.shape[1]), []
    for t in range(x.shape[2]):
        state = state * (dt[..., t, None] * A).exp() + (dt * x)[..., t, None] * B[:, None, :, t]
        outs.append(torch.einsum("bcn,bn->bc", state, C[..., t]))
    return (torch.stack(outs, -1) + D[:, None] * x) * nn.functional.silu(z)


def compute_by_definition(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Puts these in the place of those of a model's family."""
    module = sys.modules[type(model).__module__]
    functions = {
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": delta_rule,
        "mamba2_chunk_scan": chunk_scan,
        "mamba_selective_scan": selective_scan,
    }
    for name, function in functions.items():
        if hasattr(module, name):
            patch.setattr(module, name, function)
