"""Recurrent layers and short convolutions that stay inside their segment, and go on from its prefix.

transformers' own run over the whole row of tokens, so that a segment would go on from the one before. They all have one
form: a forward around a few functions of their file that mix tokens (`causal_conv1d_fn`, `mamba2_chunk_scan`,
`torch_chunk_gated_delta_rule`, `chunk_kimi_delta_attention`, `mamba_selective_scan`). With a plan, that same forward is
run with functions that know segments in their place (`ops.recurrence`). The plan travels to the layer as a keyword
argument, or, through modules that hand no keyword arguments on (Mamba, Jamba), as its attention mask; from there a
context tells it to the functions. Only the instances of a model are changed: the family's module and classes stay as
they are, and without a plan the forward is their class's own.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from lowtide.compat.transformers import CACHES, classes_of_family, drops_keywords, rebound_forward
from lowtide.engine.encoder_decoder import PLAN
from lowtide.engine.over_ranks.split_plan import SplitPlan
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.attention.cached_attention import CachedPlan
from lowtide.ops.recurrence.chained_recurrence import chained_convolution, chained_recurrence
from lowtide.ops.recurrence.chunked import CHUNK, CHUNK_BY_CHANNEL
from lowtide.ops.recurrence.linear_recurrence import LinearRecurrence
from lowtide.ops.recurrence.recurrence import RECOMPUTED, ComputedAgain, Recurrence
from lowtide.ops.recurrence.selective_scan import CHUNK_OF_SCAN, SelectiveScan

HELD = (*CACHES, "attention_mask")
"""What a layer's forward is not given beside a plan: states that it would go on from, and what is padding."""

_longest: ContextVar[int] = ContextVar("longest", default=CHUNK)
_ran: ContextVar[set[nn.Module] | None] = ContextVar("ran", default=None)


@dataclass
class _Call:
    """A layer's forward by a plan."""

    plan: AttentionPlan | CachedPlan | SplitPlan
    layer: nn.Module
    recurrences: int = 0
    """How many it has computed; each head has one of its own in Zamba."""

    def state(self) -> Hashable:
        """Tells the state of the layer's next recurrence from all others of the model."""
        self.recurrences += 1
        return self.layer, "state", self.recurrences


_call: ContextVar[_Call] = ContextVar("call")


def install_mixers(model: nn.Module) -> None:
    """Gives the layers of a model that mix tokens otherwise than by attention a forward that knows segments."""
    prepared = set(mixers(model))
    for module in model.modules():
        if module in prepared:
            module.forward = types.MethodType(_forward, module)
            vars(module).setdefault(RECOMPUTED, False)
        elif drops_keywords(type(module)) and not prepared.isdisjoint(module.modules()):
            module.forward = types.MethodType(_hand_on, module)


def leave_mixers(model: nn.Module) -> None:
    """The model runs padded, where layers compute their recurrences as their class does."""
    for module in model.modules():
        vars(module).pop(RECOMPUTED, None)


def mixers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that mix tokens by functions that are known here, prepared or not."""
    return [module for module in model.modules() if rebound_forward(type(module), FUNCTIONS) is not None]


def has_recurrences(config: PreTrainedConfig) -> bool:
    """Whether layers of a family compute recurrences by functions that are known here."""
    return any(rebound_forward(kind, RECURRENCES) is not None for kind in classes_of_family(config))


@contextlib.contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    """While it lasts, recurrences are computed in chunks of at most so many tokens, so that short rows have several."""
    token = _longest.set(tokens)
    try:
        yield
    finally:
        _longest.reset(token)


@contextlib.contextmanager
def observed_mixers() -> Iterator[set[nn.Module]]:
    """Collects the layers that ran by a plan while the context lasts."""
    ran: set[nn.Module] = set()
    token = _ran.set(ran)
    try:
        yield ran
    finally:
        _ran.reset(token)


def _hand_on(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the forward of the module's class computes; the plan, which it would drop, takes the place of the mask."""
    if (plan := kwargs.get(PLAN)) is not None:
        kwargs["attention_mask"] = plan
    return type(self).forward(self, *args, **kwargs)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the forward of the layer's class computes, within the segments of the plan."""
    plan = kwargs.get(PLAN, kwargs.get("attention_mask"))
    if not isinstance(plan, AttentionPlan | CachedPlan | SplitPlan):
        return type(self).forward(self, *args, **kwargs)
    if (ran := _ran.get()) is not None:
        ran.add(self)
    function = rebound_forward(type(self), FUNCTIONS)
    assert function is not None
    token = _call.set(_Call(plan, self))
    try:
        return function(self, *args, **{**kwargs, **{name: None for name in HELD if name in kwargs}})
    finally:
        _call.reset(token)


# -- what the forwards call instead of transformers' functions; tensors have a batch dimension of 1 -------------------


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: [1, channels, tokens] to the same."""
    call = _call.get()
    plan, of_layer = call.plan, (call.layer, "taps")
    x = hidden_states[0].T
    if isinstance(plan, AttentionPlan):
        out = chained_convolution(of_layer, x, weight, plan)
    else:
        out = plan.convolve(of_layer, x, weight)
    out = out if bias is None else out + bias
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(hidden_states.dtype).T[None]


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: [1, tokens, heads, width] each."""
    q, k = _wide(query[0]), _wide(key[0])
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    chunk = CHUNK_BY_CHANNEL if g.ndim == 4 else CHUNK
    out = _computed(LinearRecurrence(q * q.shape[-1] ** -0.5, k, value[0], g[0], beta[0]), chunk)
    return out.to(query.dtype)[None], None


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **given: Any,
) -> Tensor:
    """`mamba2_chunk_scan`: [1, tokens, heads, width] to the same, at least in float32."""
    x, dt, skip = _wide(hidden_states[0]), _time_steps(dt[0], **given), given["D"]
    out = _computed(LinearRecurrence(C[0], B[0], x * dt[..., None], A * dt, None), CHUNK)
    return (out if skip is None else out + skip[:, None] * x)[None]


def _time_steps(
    dt: Tensor,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    return _wide(torch.clamp(F.softplus(dt) if dt_softplus else dt, *dt_limit))


def _selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **given: Any,
) -> Tensor:
    """`mamba_selective_scan`: [1, channels, tokens] to the same, at least in float32."""
    x, dt = _wide(hidden_states[0].T), _time_steps(dt[0].T, given.get("delta_bias"), given.get("delta_softplus", False))
    out = _computed(SelectiveScan(x, dt, A, B[0].T, C[0].T), CHUNK_OF_SCAN)
    if (skip := given.get("D")) is not None:
        out = out + skip * x
    if (gate := given.get("z")) is not None:
        out = out * F.silu(gate[0].T)
    return out.T[None]


def _not_fused(*_: Any, **__: Any) -> None:
    """`mamba2_split_conv1d_scan_combined` and `mamba_inner_fn`, which forwards do without where they return nothing."""


def _computed(recurrence: Recurrence, chunk: int) -> Tensor:
    """What its tokens read off the states of the layer that asks.

    Args:
        chunk: tokens of a chunk at most.
    """
    call, chunk = _call.get(), min(chunk, _longest.get())
    if vars(call.layer).get(RECOMPUTED) and torch.is_grad_enabled():
        recurrence = ComputedAgain(recurrence)
    if isinstance(call.plan, AttentionPlan):
        return chained_recurrence(call.state(), recurrence, call.plan, chunk)
    return call.plan.recur(call.state(), recurrence, chunk)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


FUNCTIONS = (
    ("causal_conv1d_fn", _convolution),
    ("torch_chunk_gated_delta_rule", _delta_rule),
    ("chunk_kimi_delta_attention", _delta_rule),
    ("mamba2_chunk_scan", _chunk_scan),
    ("mamba2_split_conv1d_scan_combined", _not_fused),
    ("mamba_selective_scan", _selective_scan),
    ("mamba_inner_fn", _not_fused),
)
"""With the names under which the forwards of transformers' layers call them."""
RECURRENCES = FUNCTIONS[1:]
"""Those that carry a state further than a few tokens."""
