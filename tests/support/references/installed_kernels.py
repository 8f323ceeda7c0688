"""What stands for kernels of fla and causal-conv1d where they are not installed: functions of their signatures, which
ask of their inputs what theirs ask, and compute by the definition."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.ops import installed_kernels
from lowtide.ops.target import Target


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """That of `fla.ops.gated_delta_rule`."""
    assert g.ndim == 3
    assert not use_qk_l2norm_in_kernel
    return _sequences(q, k, v, g[..., None], beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """That of `fla.ops.kda`."""
    assert g.shape == (*v.shape[:3], k.shape[3])
    assert not use_qk_l2norm_in_kernel
    assert not use_gate_in_kernel
    return _sequences(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """That of `fla.ops.simple_gla`, which wants as many keys as values."""
    assert g is not None
    assert g_gamma is None
    assert q.shape[2] == k.shape[2] == v.shape[2]
    return _sequences(q, k, v, g[..., None], None, scale, initial_state, output_final_state, cu_seqlens)


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float | None, initial: Tensor | None,
    final: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert q.shape[0] == 1
    assert {q.dtype, k.dtype, v.dtype} <= {torch.bfloat16, torch.float16}
    assert cu_seqlens is not None
    assert cu_seqlens.dtype == torch.int64
    shared, bounds = v.shape[2] // k.shape[2], cu_seqlens.tolist()
    assert bounds[-1] == v.shape[1]
    if initial is not None:
        assert initial.dtype == torch.float32
        assert len(initial) == len(bounds) - 1
    out, states = [], []
    wide = [x[0].float().repeat_interleave(shared, 1) for x in (q, k)]
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    for number, (start, stop) in enumerate(pairwise(bounds)):
        state = v.new_zeros(v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        state = state if initial is None else initial[number]
        for t in range(start, stop):
            query, key, new = wide[0][t], wide[1][t], v[0, t].float()
            state = state * g[0, t].exp()[..., None]
            if beta is not None:
                new = beta[0, t, :, None].float() * (new - (key[:, None] @ state)[:, 0])
            state = state + key[..., None] * new[:, None]
            out.append((query[:, None] @ state)[:, 0] * factor)
        states.append(state)
    return torch.stack(out)[None].to(q.dtype), torch.stack(states) if final else None


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """That of `causal_conv1d`, which wants channels side by side, in eights, where it is told of sequences."""
    assert bias is initial_states is final_states_out is activation is None
    assert not return_final_states
    assert seq_idx is not None
    assert seq_idx.shape == (1, x.shape[2])
    assert seq_idx.dtype == torch.int32
    assert x.stride(1) == 1
    assert x.stride(2) % 8 == 0
    assert 2 <= weight.shape[1] <= 4
    rows = [x[:, :, seq_idx[0] == number] for number in range(int(seq_idx.max()) + 1)]
    padded = (F.pad(row, (weight.shape[1] - 1, 0)).float() for row in rows)
    outs = [F.conv1d(row, weight[:, None].float(), groups=len(weight)) for row in padded]
    return torch.cat(outs, 2).to(x.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda": chunk_kda,
    "fla.ops.simple_gla": chunk_simple_gla,
    "causal_conv1d": causal_conv1d_fn,
}
"""By module."""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations choose as where tensors lie on a GPU, of which nothing is known yet."""
    monkeypatch.setattr(installed_kernels, "target_of", lambda _: Target("cuda", (9, 0)))
    monkeypatch.setattr(installed_kernels, "_found", {})
    for module in ("fla", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it is refused, as where it is missing


def put_in_place(monkeypatch: pytest.MonkeyPatch, **instead: Callable[..., Any]) -> None:
    """Makes stand-ins importable.

    Args:
        instead: other functions, by their names.
    """
    for name, function in FUNCTIONS.items():
        *parents, _ = [name[:end] for end, letter in enumerate(name + ".") if letter == "."]
        for parent in parents:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(name)
        setattr(module, function.__name__, instead.get(function.__name__, function))
        monkeypatch.setitem(sys.modules, name, module)
