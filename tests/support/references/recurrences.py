"""The recurrences of transformers' layers by their definition, token by token, in the precision of their inputs.

transformers' own compute in float32 whatever they are given, so that of a model in float64 they are no reference.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn


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


def compute_by_definition(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Puts these in the place of those of a model's family."""
    module = sys.modules[type(model).__module__]
    functions = {
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": delta_rule,
        "mamba2_chunk_scan": chunk_scan,
    }
    for name, function in functions.items():
        if hasattr(module, name):
            patch.setattr(module, name, function)
