"""Linear recurrences over segments of unequal length, some of which go on from a part of another.

A head's state S is a matrix [keys, values] that starts at zero, and each token t updates and reads it:

    S_t = decay_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T,    o_t = q_t S_t

With `beta` this is the gated delta rule (arXiv 2412.06464), or Kimi's delta attention where each channel of the key has
a decay of its own (arXiv 2510.26692). Without it, `S_t = decay_t S_(t-1) + k_t v_t^T`, it is Mamba-2 (arXiv 2405.21060)
and lightning attention (arXiv 2401.04658).

It is computed in chunks of tokens (`layout`): all pairs within a chunk by matrix products, and one state from chunk to
chunk.

Everything is computed at least in float32, outside of autocast: a state is a sum over all tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.ops.attention.attention_plan import scattered
from lowtide.ops.recurrence.layout import RecurrenceLayout, scan
from lowtide.ops.target import without_autocast

CHUNK = 64
"""Tokens of a chunk."""
CHUNK_BY_CHANNEL = 16
"""The same where each channel decays by itself: pairs of tokens are products of three vectors there."""


class _Factors(NamedTuple):
    """What the scan needs of all chunks, [chunks, heads, chunk, ..]."""

    query: Tensor
    """What reads a state."""
    key: Tensor
    """What reads the part of a state that a token replaces; read with `beta` alone."""
    written: Tensor
    """The keys by which values are written to the state after the chunk."""
    fade: Tensor | float
    """Factor of what is read, for each token."""
    late: Tensor | float
    """Factor of what is written, for each token."""
    whole: Tensor
    """Factor of the state over the chunk."""
    within: Tensor
    """[chunks, heads, chunk, chunk]: what each token gathers from the values of each in its chunk."""
    overlap: Tensor | None
    """The same of a key with those before it; None without `beta`. Only what is below the diagonal counts."""


def linear_recurrence(
    query: Float[Tensor, "tokens key_heads keys"],
    key: Float[Tensor, "tokens key_heads keys"],
    value: Float[Tensor, "tokens heads values"],
    log_decay: Float[Tensor, "tokens heads *channels"],
    beta: Float[Tensor, "tokens heads"] | None,
    layout: RecurrenceLayout,
    initial: Float[Tensor, "segments heads keys values"] | None = None,
    *,
    final: bool = False,
) -> tuple[Float[Tensor, "tokens heads values"], Float[Tensor, "segments heads keys values"] | None]:
    """What each token reads off its state, and the states after the segments.

    Args:
        query: `heads` is a multiple of `key_heads`, each of which serves neighbouring heads.
        log_decay: logarithms of the factors of the state, at most 0: of each head, or of each channel of its keys
            (then there are as many key heads as heads).
        beta: how much of what is stored under a key its value replaces; None adds values to what is there.
        initial: the states that segments without a prefix start from; zero if None.
        final: whether the states after the segments are returned.

    Returns:
        In the order of the tokens, at least in float32; and the states, or None.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)

    def lay(x: Tensor, *, masked: bool = False) -> Tensor:
        """[tokens, heads, width] to [chunks, heads, chunk, width]."""
        return layout.lay(x.to(dtype), masked=masked).transpose(1, 2).contiguous()  # products would copy it each time

    with without_autocast(value.device):
        # A key of zero writes nothing, and a decay of one forgets nothing: no more has to be masked.
        q, k, v = lay(query), lay(key, masked=True), lay(value)
        rate = None if beta is None else lay(beta[..., None])
        if log_decay.ndim == 3:
            factors = _by_channel(q, k, lay(log_decay, masked=True), rate)
        else:
            factors = _by_head(q, k, lay(log_decay[..., None], masked=True)[..., 0], rate)
        chunks = _of_steps(factors, v, rate, layout)
        start = None if initial is None else initial.to(dtype)
        outs, finals = scan(lambda number, state: _step(*chunks[number], state), layout, start, final)
        out = torch.cat(outs).transpose(1, 2).contiguous().flatten(0, 1)
    return scattered(out, layout.gather), finals


def recurrence_step(
    query: Float[Tensor, "rows key_heads keys"],
    key: Float[Tensor, "rows key_heads keys"],
    value: Float[Tensor, "rows heads values"],
    log_decay: Float[Tensor, "rows heads *channels"],
    beta: Float[Tensor, "rows heads"] | None,
    state: Float[Tensor, "rows heads keys values"],
) -> tuple[Float[Tensor, "rows heads values"], Float[Tensor, "rows heads keys values"]]:
    """One token of each row: what it reads off its state, and the state after it, both in the state's type."""
    with without_autocast(value.device):
        shared = value.shape[1] // key.shape[1]
        q, k = (x.to(state.dtype).repeat_interleave(shared, 1)[:, :, None] for x in (query, key))
        decay = log_decay.to(state.dtype).exp()
        state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        new = value.to(state.dtype)[:, :, None]
        if beta is not None:
            new = beta.to(state.dtype)[..., None, None] * (new - k @ state)
        state = state + k.transpose(-1, -2) * new
        return (q @ state)[:, :, 0], state


def _by_head(query: Tensor, key: Tensor, log_decay: Tensor, rate: Tensor | None) -> _Factors:
    """Of one decay a head, [chunks, heads, chunk]."""
    total, asking = log_decay.cumsum(-1), (query,) if rate is None else (query, key)
    within, *overlap = _Faded.apply(total, *(x @ key.transpose(-1, -2) for x in asking))
    return _Factors(
        query=query,
        key=key,
        written=key,
        fade=total.exp()[..., None],
        late=(total[..., -1:] - total).exp()[..., None],
        whole=total[..., -1].exp()[..., None, None],
        within=within,
        overlap=None if rate is None else overlap[0] * rate,
    )


def _by_channel(query: Tensor, key: Tensor, log_decay: Tensor, rate: Tensor | None) -> _Factors:
    """Of a decay for each channel of the keys, [chunks, heads, chunk, keys]."""
    total = log_decay.cumsum(-2)
    faded = total.exp()
    return _Factors(
        query=query * faded,
        key=key * faded,
        written=key * (total[..., -1:, :] - total).exp(),
        fade=1.0,
        late=1.0,
        whole=faded[..., -1, :, None],
        within=_PairProducts.apply(query, key, total),
        overlap=None if rate is None else _PairProducts.apply(key * rate, key, total),
    )


def _of_steps(
    factors: _Factors, value: Tensor, rate: Tensor | None, layout: RecurrenceLayout
) -> list[tuple[_Factors, Tensor, Tensor | None, Tensor | None]]:
    """The factors, values, rates and inverses of `I + overlap` of the chunks of each step."""
    inverse = None
    if factors.overlap is not None:
        eye = torch.eye(layout.chunk, dtype=value.dtype, device=value.device).expand_as(factors.overlap)
        inverse = torch.linalg.solve_triangular(factors.overlap, eye, upper=False, unitriangular=True)
    counts = layout.counts

    def split(x: Tensor | float | None) -> Sequence[Any]:
        # Slices would each have a gradient of all chunks in backward.
        return x.split(counts) if isinstance(x, Tensor) else [x] * len(counts)

    each = zip(*(split(x) for x in factors._replace(overlap=None)), strict=True)
    return list(zip((_Factors(*of_step) for of_step in each), split(value), split(rate), split(inverse), strict=True))


def _step(
    factors: _Factors, value: Tensor, rate: Tensor | None, inverse: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the tokens of some chunks read, and the states after these; without a state before them it is zero."""
    new = value
    if rate is not None and inverse is not None:
        there = 0.0 if state is None else factors.fade * _read(factors.key, state)
        new = inverse @ (rate * (new - there))
    out = factors.within @ new
    if state is not None:
        out = _plus(out, factors.fade, _read(factors.query, state))
    added = _written(factors.written, new * factors.late)
    return out, added if state is None else torch.addcmul(added, state, factors.whole)


def _plus(out: Tensor, factor: Tensor | float, x: Tensor) -> Tensor:
    return torch.addcmul(out, factor, x) if isinstance(factor, Tensor) else torch.add(out, x, alpha=factor)


def _read(x: Tensor, state: Tensor) -> Tensor:
    """[chunks, key_heads, chunk, keys] and [chunks, heads, keys, values] to [chunks, heads, chunk, values]."""
    own = state.unflatten(1, (x.shape[1], -1))
    return (x[:, :, None] @ own).flatten(1, 2)


def _written(key: Tensor, value: Tensor) -> Tensor:
    """[chunks, key_heads, chunk, keys] and [chunks, heads, chunk, values] to [chunks, heads, keys, values]."""
    own = value.unflatten(1, (key.shape[1], -1))
    return (key.transpose(-1, -2)[:, :, None] @ own).flatten(1, 2)


class _Faded(torch.autograd.Function):
    """Numbers of the pairs of tokens of a chunk, [chunks, key_heads, chunk, chunk], faded from the earlier token to the
    later one by each head, [chunks, heads, chunk, chunk]; those of a token with later ones become zero.

    A factor is `exp(total_i - total_j)`, so that the gradient of its exponent is that of the result times the result.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, *pairs: Tensor) -> tuple[Tensor, ...]:
        ahead = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill_(ahead, float("-inf")).exp_()
        of_keys = decay.unflatten(1, (pairs[0].shape[1], -1))
        faded = tuple((each[:, :, None] * of_keys).flatten(1, 2) for each in pairs)
        ctx.save_for_backward(of_keys, *faded)
        return faded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        of_keys, *faded = ctx.saved_tensors
        exponents = grads[0] * faded[0]
        for grad, each in zip(grads[1:], faded[1:], strict=True):
            exponents.addcmul_(grad, each)
        of_pairs = (grad.unflatten(1, of_keys.shape[1:3]) * of_keys for grad in grads)
        alone = of_keys.shape[2] == 1
        return exponents.sum(-1) - exponents.sum(-2), *(each[:, :, 0] if alone else each.sum(2) for each in of_pairs)


class _PairProducts(torch.autograd.Function):
    """`sum over channels of x_i k_j exp(total_i - total_j)` for j <= i, [.., chunk, keys] to [.., chunk, chunk].

    The exponents are differences that are at most 0: of `exp(total_i)` and `exp(-total_j)` apart the second would
    overflow. Pairs are formed anew in backward, for one j at a time: kept, they would be `chunk` times the keys.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, key, total)
        chunk = x.shape[-2]
        out = x.new_zeros(*x.shape[:-1], chunk)
        for j in range(chunk):
            later = slice(j, None)
            faded = key[..., j : j + 1, :] * (total[..., later, :] - total[..., j : j + 1, :]).exp()
            out[..., later, j] = (x[..., later, :] * faded).sum(-1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        x, key, total = ctx.saved_tensors
        of_x, of_key = torch.zeros_like(x), torch.zeros_like(key)
        for j in range(x.shape[-2]):
            later = slice(j, None)
            faded = grad[..., later, j, None] * (total[..., later, :] - total[..., j : j + 1, :]).exp()
            of_x[..., later, :] += faded * key[..., j : j + 1, :]
            of_key[..., j, :] = (faded * x[..., later, :]).sum(-2)
        return of_x, of_key, x * of_x - key * of_key
