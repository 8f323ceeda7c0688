"""Attention to one block of keys, with the log-sum-exp of its scores; blocks are merged by it.

`out = sum exp(lse_i - lse) out_i` with `lse = logsumexp(lse_i)` over the blocks. A kernel's backward, given the merged
`out` and `lse` in place of its own, yields the block's part of each gradient, since a weight of the merged softmax is
`exp(score - lse)`: so attention over many blocks needs neither a mask nor a tensor over all of them (FlashAttention-2,
arXiv 2307.08691; Ring Attention, 2310.01889).

Shapes: `queries` of a call, `keys` of its block. A block is either seen whole by each query, or `causal`: it is the
queries' own, and a query sees no key after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from lowtide.compat.torch import cpu_flash, cpu_flash_backward, cuda_flash, cuda_flash_backward
from lowtide.ops.attention.attention_plan import Rules
from lowtide.ops.attention.value_width import widened
from lowtide.ops.target import target_of

ENTRIES = 1 << 23
"""Scores that are written out at a time."""

_in_blocks: ContextVar[bool] = ContextVar("in_blocks", default=False)


@contextlib.contextmanager
def in_blocks() -> Iterator[None]:
    """Around the calls of one attention to its blocks, of which none is a result that is worth keeping."""
    token = _in_blocks.set(True)
    try:
        yield
    finally:
        _in_blocks.reset(token)


def computing_blocks() -> bool:
    """Whether a call is one of several of the same attention."""
    return _in_blocks.get()


class Part(NamedTuple):
    """What queries gather from a block."""

    out: Float[Tensor, "queries heads value_dim"]
    lse: Float[Tensor, "queries heads"]
    """At least in float32."""


class BlockKernel(Protocol):
    """Attention to one block."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules, *, causal: bool) -> Part: ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, merged: Part, rules: Rules, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of the gradients of query, key and value, from that of the merged `out`."""
        ...


def block_kernel(query: Tensor, value: Tensor, rules: Rules) -> BlockKernel:
    """The one that serves a call."""
    dim, own = query.shape[-1], value.shape[-1]
    found: BlockKernel | None = None
    if rules.softcap is None and own <= dim:
        target = target_of(query)
        half = query.dtype in (torch.float16, torch.bfloat16)
        if target.kind == "cpu":
            found = CpuFlash()
        elif target.kind == "cuda" and half and target.capability >= (8, 0) and dim % 8 == 0 and dim <= 256:
            found = CudaFlash()
    if found is None:
        return WrittenOut()
    return found if own == dim else Widened(found)


class CpuFlash:
    """The CPU's flash kernel."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules, *, causal: bool) -> Part:
        out, lse = cpu_flash(_heads_first(query), _heads_first(key), _heads_first(value), causal, rules.scale)
        return Part(out[0].transpose(0, 1), lse[0].transpose(0, 1))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, merged: Part, rules: Rules, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value = (_heads_first(each) for each in (grad, query, key, value))
        out, lse = _heads_first(merged.out), _heads_first(merged.lse)
        query, key, value = cpu_flash_backward(grad, query, key, value, (out, lse), causal, rules.scale)
        return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)


class CudaFlash:
    """torch's own flash attention on CUDA, of segments of unequal length."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules, *, causal: bool) -> Part:
        out, lse = cuda_flash(query, key, value, causal, rules.scale)
        return Part(out, lse.transpose(0, 1))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, merged: Part, rules: Rules, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = merged.lse.transpose(0, 1).contiguous()
        return cuda_flash_backward(grad, query, key, value, merged.out, lse, causal, rules.scale)


class Widened:
    """A kernel for values as wide as keys, given narrower ones."""

    def __init__(self, kernel: BlockKernel) -> None:
        self.kernel = kernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules, *, causal: bool) -> Part:
        found = self.kernel.forward(query, key, widened(value, key.shape[-1]), rules, causal=causal)
        return found._replace(out=found.out[..., : value.shape[-1]])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, merged: Part, rules: Rules, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, wide, out = (widened(each, key.shape[-1]) for each in (grad, value, merged.out))
        part = merged._replace(out=out)
        grad_query, grad_key, grad_value = self.kernel.backward(grad, query, key, wide, part, rules, causal=causal)
        return grad_query, grad_key, grad_value[..., : value.shape[-1]]


class WrittenOut:
    """Scores written out for some queries at a time, at least in float32: for soft-caps, for values wider than keys,
    and for devices and dtypes without a kernel."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rules: Rules, *, causal: bool) -> Part:
        outs, lses = [], []
        _, v = _grouped(query, key), _grouped(query, value)
        for queries in _query_blocks(query, key):
            scores = self._scores(query[queries], key, rules, queries.start if causal else None)
            lse = scores.logsumexp(-1)
            weights = torch.exp(scores - lse[..., None]).to(query.dtype)
            outs.append(_tokens_first(weights @ v))
            lses.append(lse.flatten(0, 1).transpose(0, 1))
        return Part(torch.cat(outs), torch.cat(lses))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, merged: Part, rules: Rules, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        k, v = _grouped(query, key), _grouped(query, value)
        repeat = query.shape[1] // key.shape[1]
        grad_query = torch.empty_like(query, dtype=wide)
        grad_key, grad_value = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value))
        for queries in _query_blocks(query, key):
            q, own, out = (_by_group(each[queries], repeat) for each in (query, grad, merged.out))
            scores = self._scores(query[queries], key, rules, queries.start if causal else None)
            lse = merged.lse[queries].transpose(0, 1).unflatten(0, (-1, repeat))
            weights = torch.exp(scores - lse[..., None])
            given = (own.to(wide) * out.to(wide)).sum(-1, keepdim=True)
            slope = weights * ((own @ v.transpose(-1, -2)).to(wide) - given)
            if rules.softcap is not None:
                inside = (scores / rules.softcap).masked_fill(scores.isinf(), 0.0)
                slope = slope * (1 - inside * inside)
            slope = (slope * rules.scale).to(query.dtype)
            grad_query[queries] = _tokens_first(slope @ k)
            grad_key += (slope.transpose(-1, -2) @ q).sum(1).transpose(0, 1)
            grad_value += (weights.to(query.dtype).transpose(-1, -2) @ own).sum(1).transpose(0, 1)
        return grad_query, grad_key, grad_value

    @staticmethod
    def _scores(query: Tensor, key: Tensor, rules: Rules, first: int | None) -> Float[Tensor, "kv repeat queries keys"]:
        """Of some queries; `first` is the place of the first of them among causal keys."""
        q = _by_group(query, query.shape[1] // key.shape[1])
        scores = (q @ _grouped(query, key).transpose(-1, -2)) * rules.scale
        if rules.softcap is not None:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        scores = scores.to(torch.promote_types(query.dtype, torch.float32))
        if first is None:
            return scores
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
        return scores.masked_fill(ahead, float("-inf"))


def _query_blocks(query: Tensor, key: Tensor) -> list[slice]:
    """Queries whose scores are written out together."""
    count, heads, _ = query.shape
    most = max(ENTRIES // (heads * key.shape[0]), 1)
    return [slice(start, min(start + most, count)) for start in range(0, count, most)]


def _by_group(x: Tensor, repeat: int) -> Float[Tensor, "kv repeat queries dim"]:
    """Query heads by the head of keys that they read."""
    return x.transpose(0, 1).unflatten(0, (-1, repeat))


def _grouped(query: Tensor, x: Tensor) -> Float[Tensor, "kv 1 keys dim"]:
    return x.transpose(0, 1)[:, None]


def _tokens_first(x: Float[Tensor, "kv repeat queries dim"]) -> Float[Tensor, "queries heads dim"]:
    return x.flatten(0, 1).transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """[queries, heads, ..] as [1, heads, queries, ..]."""
    return x.transpose(0, 1)[None]


class Merged:
    """The sum over blocks so far.

    Args:
        first: what the queries gather from a first block; its tensors are overwritten.
    """

    def __init__(self, first: Part) -> None:
        self.out, self.lse = first.out.to(first.lse.dtype), first.lse

    def add(self, part: Part) -> None:
        """Adds what they gather from another block."""
        self._scale_to(torch.logaddexp(self.lse, part.lse))
        self.out.addcmul_(part.out.to(self.out.dtype), torch.exp(part.lse - self.lse)[..., None])

    def add_sinks(self, sinks: Float[Tensor, " heads"]) -> None:
        """Adds a score for each head that gives nothing."""
        self._scale_to(torch.logaddexp(self.lse, sinks.to(self.lse.dtype).expand_as(self.lse)))

    def _scale_to(self, lse: Tensor) -> None:
        self.out.mul_(torch.exp(self.lse - lse)[..., None])
        self.lse = lse
