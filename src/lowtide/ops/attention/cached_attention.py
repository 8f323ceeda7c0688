"""Attention of new tokens to keys that are held from before: what a model's attention is while it generates.

A completion's keys lie in two places: those of its prompt, which it shares with the other completions of the prompt,
and its own. Attention to each is computed apart, and the two are merged by their log-sum-exps, which is exact. A kernel
computes each where there is one that gives the log-sum-exp too: on CUDA that of `cached_flash`, on a CPU torch's flash
attention. Elsewhere scores are written out: a new token has one row of them, so they are small beside the keys, and
every rule (soft-caps, sinks, windows) is a line.

Shapes: `lines` that share nothing, `kv_heads` heads of keys and values, `tokens` new ones of a line, `share` query
heads that read the same head of keys, `keys` of a line (padded), `dim` a head's width. A stack is a head of keys of a
line, and its queries are those of the tokens and heads that read it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lowtide.compat.torch import cpu_flash
from lowtide.ops.attention.attention_plan import Rules, Sight
from lowtide.ops.attention.varlen_attention import AttentionRules
from lowtide.ops.recurrence.recurrence import Recurrence
from lowtide.ops.target import kind_of

Rotary = tuple[Float[Tensor, "tokens turned"], Float[Tensor, "tokens turned"]]
"""Cosines and sines."""


class CachedPlan(ABC):
    """How the tokens of one forward attend, and where their keys and values are kept. All layers share it."""

    positions: Int[Tensor, " tokens"]
    """Places of the tokens in their rows."""
    axes: Int[Tensor, "axes tokens"] | None = None
    """Their positions, of a model that has several axes and counts them by images; None for one that reads places."""

    @abstractmethod
    def attend(
        self,
        layer: Hashable,
        query: Float[Tensor, "tokens heads dim"],
        key: Float[Tensor, "tokens kv_heads dim"],
        value: Float[Tensor, "tokens kv_heads value_dim"],
        asked: AttentionRules,
        rotary: Rotary | None = None,
    ) -> Float[Tensor, "tokens heads value_dim"]:
        """Keeps the keys and values of a layer's new tokens, and gives what these tokens gather.

        Args:
            layer: tells the layer from all others of the model.
            asked: what the layer asks of its attention.
            rotary: by which queries and keys are turned first, and written over; None: they are turned.
        """

    @abstractmethod
    def recur(self, layer: Hashable, recurrence: Recurrence, chunk: int) -> Float[Tensor, "tokens ..."]:
        """What new tokens read off the states that are held of a layer, which are those after these tokens then.

        Args:
            chunk: tokens of a chunk.
        """

    @abstractmethod
    def convolve(
        self, layer: Hashable, x: Float[Tensor, "tokens channels"], weight: Float[Tensor, "channels taps"]
    ) -> Float[Tensor, "tokens channels"]:
        """`ops.convolution.causal_convolution` after the last inputs that are held of a layer."""

    def stands_for(self, layer: Hashable, key: Tensor) -> Hashable:
        """The layer under which the keys are kept: layers that share one tensor of keys share what is kept of it.

        Args:
            key: as the layer was given it, before any view of it was made.
        """
        return layer


class Part(NamedTuple):
    """What tokens gather from some of their keys. Tokens and heads may take several dimensions."""

    out: Float[Tensor, "*tokens_heads value_dim"]
    lse: Float[Tensor, "*tokens_heads"]
    """Log-sum-exp of their scores."""


def seen(
    position: Int[Tensor, "*#lines tokens 1"], key_position: Int[Tensor, "*#lines 1 keys"], sight: Sight
) -> Bool[Tensor, "*#lines tokens keys"]:
    """Which keys a token sees of those before it, by their places in its row."""
    mask = key_position <= position
    if sight.window is not None:
        mask &= key_position > position - sight.window
    if sight.chunk is not None:
        mask &= key_position // sight.chunk == position // sight.chunk
    return mask


def as_bias(
    mask: Bool[Tensor, "lines tokens keys"], kv_heads: int, share: int, dtype: torch.dtype
) -> Float[Tensor, "stacks 1 queries keys"]:
    """What is added to the scores: 0 where a key is seen, and so little elsewhere that its weight is 0.

    It is finite, so that a token that sees no key of a part gets numbers, which the merge gives no weight.

    Args:
        share: query heads that read the same head of keys.

    Returns:
        a stack for each head of keys of each line; of one query where all tokens of a line see the same keys.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    bias.masked_fill_(~mask, torch.finfo(dtype).min / 4)
    if mask.shape[1] > 1:
        bias = bias.repeat_interleave(share, 1)
    return bias.repeat_interleave(kv_heads, 0)[:, None]


def gather_from(
    query: Float[Tensor, "stacks 1 queries dim"],
    key: Float[Tensor, "stacks 1 keys dim"],
    value: Float[Tensor, "stacks 1 keys value_dim"],
    bias: Float[Tensor, "stacks 1 _ keys"] | None,
    rules: Rules,
) -> tuple[Float[Tensor, "stacks 1 queries value_dim"], Float[Tensor, "stacks 1 queries"]]:
    """What queries gather from keys, and the log-sum-exps of their scores, which are at least in float32.

    A stack is a head of keys of a line, alone; its queries are those of all heads and tokens that read it.
    """
    if _on_cpu(query, value, rules):
        mask = bias if bias is None or bias.dtype == query.dtype else bias.to(query.dtype)
        return cpu_flash(query, key, value, False, rules.scale, mask)
    query, key, value = query[:, 0], key[:, 0], value[:, 0]
    scores = _scores(query, key, bias if bias is None else bias[:, 0], rules)
    top = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1)
    # The largest weight is exp(top - lse), and at least one over the number of keys.
    lse = top - weights.amax(-1, keepdim=True).log_()
    return torch.bmm(weights.to(value.dtype), value)[:, None], lse.transpose(1, 2)


def _on_cpu(query: Tensor, value: Tensor, rules: Rules) -> bool:
    """Whether the CPU's kernel serves. In float16 a bias would be infinite."""
    plain = rules.softcap is None and value.shape[-1] == query.shape[-1]
    return plain and kind_of(query.device) == "cpu" and query.dtype != torch.float16


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, rules: Rules) -> Tensor:
    """Scores at least in float32: a lower dtype would round them before they are exponents."""
    wide = key.dtype in (torch.float32, torch.float64)
    if wide and rules.softcap is None and bias is not None:
        return torch.baddbmm(bias, query, key.transpose(1, 2), alpha=rules.scale)
    if kind_of(key.device) == "cuda" and not wide:
        scores = torch.bmm(query, key.transpose(1, 2), out_dtype=torch.float32)
    else:
        dtype = torch.promote_types(key.dtype, torch.float32)
        scores = torch.bmm(query.to(dtype), key.to(dtype).transpose(1, 2))
    scores.mul_(rules.scale)
    if rules.softcap is not None:
        scores.div_(rules.softcap).tanh_().mul_(rules.softcap)
    return scores if bias is None else scores.add_(bias)


def merged(parts: Sequence[Part], sinks: Float[Tensor, "*heads"] | None) -> Float[Tensor, "*tokens_heads value_dim"]:
    """What tokens gather from all parts of their keys together.

    Args:
        sinks: a learned score for each head that takes its share of the weights and gives nothing; in as many
            dimensions as heads have.
    """
    if len(parts) == 1 and sinks is None:
        return parts[0].out
    if len(parts) == 2 and sinks is None:
        share = torch.sigmoid(parts[1].lse - parts[0].lse).to(parts[0].out.dtype)
        return torch.lerp(parts[0].out, parts[1].out, share[..., None])  # has the strides of the first
    lses = [part.lse for part in parts]
    if sinks is not None:
        lses.append(sinks.to(lses[0].dtype).expand_as(lses[0]))
    shares = torch.softmax(torch.stack(lses), dim=0).to(parts[0].out.dtype)
    out = parts[0].out * shares[0, ..., None]
    for part, share in zip(parts[1:], shares[1:], strict=False):
        out.addcmul_(part.out, share[..., None])
    return out
