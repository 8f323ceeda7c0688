"""Log-probabilities of chosen tokens from hidden states, without the logits.

The only loop over the vocabulary in the project. A chunk of scored positions at a time meets the head's weight;
each row of logits is reduced to a handful of numbers (`ops.logit_rows`) and forgotten. Two ways to the gradient:

- `linear_logprobs` keeps the log-sum-exp of each score and computes the logits once more in backward
  (8 N V H FLOPs in all), as in Cut Cross-Entropy (arXiv 2411.09009). It serves any objective.
- `linear_loss` is for objectives whose loss at a score depends on that score alone, such as supervised
  fine-tuning: gradients are formed in forward while the logits are there (6 N V H), as in Liger (2410.10989).

Logits are `scale * (sum of x @ weight.T over the terms + bias)`, soft-capped, over the temperature. There is one
term for a plain head and a second one for a low-rank adapter on it.

Shapes: `scores` positions that are predicted from, `vocab`, `hidden`. All statistics are in float32 (float64 for
float64 input).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lowtide.ops.in_place import takes_gradient_in_place
from lowtide.ops.logit_rows import Projection, RowStats, Slopes, TorchRows, Want
from lowtide.ops.rows_of import Rows, rows_of
from lowtide.ops.target import target_of

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Workspace for a chunk's logits: large enough for an efficient matmul, small beside everything else."""
FEW_ROWS = 32
"""Scores up to which a CPU multiplies the weight band by band."""
BANDS = 32
"""So many bands of a weight, each a product of its own: 5.6 ms in place of 11.4 for 8 scores and 9.6 for 18.5 for 32
(32,000 x 384 in float32, two cores, MKL), and no slower in bfloat16."""
BLOCK_BYTES = 1 << 20
"""On a CPU the passes over a chunk's logits go in blocks that stay in the second-level cache."""


def chunk_rows(vocab: int, dtype: torch.dtype, kind: str) -> int:
    """Scores of a chunk whose logits are in a dtype, on a kind of device."""
    return max(16, CHUNK_BYTES.get(kind, CHUNK_BYTES["cuda"]) // _row_bytes(vocab, dtype, kind))


def _row_bytes(vocab: int, dtype: torch.dtype, kind: str) -> int:
    return vocab * (dtype.itemsize if kind == "cuda" else max(dtype.itemsize, 4))


class Term(NamedTuple):
    """One summand of the logits, `x @ weight.T`."""

    x: Float[Tensor, "tokens hidden"]
    weight: Float[Tensor, "vocab hidden"]


@dataclass(frozen=True)
class TokenStats:
    """What is known of each scored token. All [scores]; None where it was not asked for."""

    logprobs: Float[Tensor, " scores"]
    entropies: Float[Tensor, " scores"] | None = None
    """Entropy of the predicted distribution, in nats."""
    mean_logprobs: Float[Tensor, " scores"] | None = None
    """Mean log-probability over the vocabulary, which label smoothing wants."""
    top1: Bool[Tensor, " scores"] | None = None
    """Whether no token is more likely than the target. Without gradient."""
    collisions: Float[Tensor, " scores"] | None = None
    """Log-probability that two draws are the same token, the log of the sum of squares. Without gradient."""


PLAIN = Projection()
NOTHING_MORE = Want()

ScoreLoss = Callable[[TokenStats], Tensor]
"""Statistics of some scores to their losses, score by score: [scores] to [scores]."""


class HeadOptions(TypedDict, total=False):
    """How the logits of a head are made and read; what is left out has its plain value."""

    bias: Float[Tensor, " vocab"] | None
    projection: Projection
    """What the logits go through before they are scored."""
    want: Want
    """The statistics beside log-probabilities."""
    accumulate: bool
    """Add the gradient of a weight that is a leaf without hooks straight into its `.grad`, instead of handing it to
    autograd, which would hold it a second time."""
    chunk: int | None
    """Scores at a time; by default as many as fit the device's workspace."""


def linear_logprobs(
    terms: Sequence[Term],
    index: Int[Tensor, " scores"],
    target: Int[Tensor, " scores"],
    **options: Unpack[HeadOptions],
) -> TokenStats:
    """Statistics of chosen tokens, differentiable in the terms and the bias.

    Args:
        terms: whose products make the logits; hidden states of all tokens.
        index: the token whose hidden state predicts each score.
        target: the token predicted there.
        options: see `HeadOptions`; of what `want` asks for, all but `top1` and `collisions` carries gradients.
    """
    bias = options.pop("bias", None)
    spec = _Spec(**cast(Any, options))
    return _wanted(spec.want, *_LinearLogprobs.apply(spec, index, target, bias, *_flat(terms)))


def linear_loss(
    terms: Sequence[Term],
    index: Int[Tensor, " scores"],
    target: Int[Tensor, " scores"],
    loss: ScoreLoss,
    *,
    factor: float | Tensor = 1.0,
    grad_scale: float = 1.0,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Tensor, ""], TokenStats]:
    """`factor` times the sum of `loss` over the scores, and the statistics without gradient.

    Args:
        loss: from statistics to losses, score by score.
        factor: of the sum, such as one over the number of scores; its gradient is not taken.
        grad_scale: the gradient with which `backward` will be called, by a loss scaler for float16 training say. The
            gradients are formed so much larger, so that small ones do not underflow before they are scaled. Another
            gradient than this one in `backward` is right as well, without that benefit.
        accumulate: a weight that is a leaf and already has a `.grad` receives its gradient in *forward*, which is
            right only if `backward` follows at once with a gradient of `grad_scale`.

    The other arguments are those of `linear_logprobs`.
    """
    bias = options.pop("bias", None)
    spec = _Spec(**cast(Any, options), grad=torch.is_grad_enabled())
    total, *stats = _LinearLoss.apply(spec, _Loss(loss, factor, grad_scale), index, target, bias, *_flat(terms))
    return total, _wanted(spec.want, *stats)


def read_logits(
    terms: Sequence[Term],
    index: Int[Tensor, " scores"],
    read: Callable[[Float[Tensor, "rows vocab"], slice], Float[Tensor, "numbers rows"]],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    projection: Projection = PLAIN,
) -> Float[Tensor, "numbers scores"]:
    """What a function reads off the logits, a chunk of scores at a time: for tokens that are drawn, not given.

    Args:
        terms: whose products make the logits; hidden states of all tokens.
        index: the token whose hidden state predicts each score.
        read: called with a chunk's logits, at least in float32, which it may overwrite, and its place among the scores.
    """
    head = ChunkedHead(_Spec(projection), index, index, bias, terms)
    with torch.autocast(index.device.type, enabled=False):
        chunks = head.few() if len(index) <= FEW_ROWS and index.device.type == "cpu" else head.chunks()
        found = [read(TorchRows(logits, index[span], projection).x, span) for span, _, logits in chunks]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


# -- inside ------------------------------------------------------------------------------------------------------


class _Spec(NamedTuple):
    projection: Projection = PLAIN
    want: Want = NOTHING_MORE
    accumulate: bool = False
    chunk: int | None = None
    grad: bool = True
    """Whether gradients are wanted at all, which the inside of an autograd function cannot see."""


class _Loss(NamedTuple):
    of_stats: ScoreLoss
    factor: float | Tensor
    grad_scale: float


def _wanted(
    want: Want, logprobs: Tensor, entropies: Tensor, means: Tensor, top1: Tensor, collisions: Tensor
) -> TokenStats:
    return TokenStats(
        logprobs,
        entropies if want.entropies else None,
        means if want.mean_logprobs else None,
        top1 if want.top1 else None,
        collisions if want.collisions else None,
    )


def _flat(terms: Sequence[Term]) -> list[Tensor]:
    return [tensor for term in terms for tensor in term]


def _pairs(flat: Sequence[Tensor]) -> tuple[Term, ...]:
    return tuple(Term(x, weight) for x, weight in zip(flat[::2], flat[1::2], strict=True))


class ChunkedHead:
    """The terms in the dtype of the matmuls, and the loop over chunks of scores."""

    def __init__(self, spec: _Spec, index: Tensor, target: Tensor, bias: Tensor | None, terms: Sequence[Term]):
        first = terms[0].x
        device = first.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else first.dtype
        self.terms = [Term(x, weight.to(dtype)) for x, weight in terms]
        self.bias, self.index, self.target = bias, index, target
        self.projection, self.want, self.dtype = spec.projection, spec.want, dtype
        vocab, kind = terms[0].weight.shape[0], target_of(first).kind
        self.chunk = spec.chunk or chunk_rows(vocab, dtype, kind)
        self.block = self.chunk if kind != "cpu" else max(1, BLOCK_BYTES // _row_bytes(vocab, dtype, kind))
        self.scratch = None
        if kind == "cpu" and (spec.want.entropies or spec.want.collisions or spec.projection.softcap is not None):
            self.scratch = torch.empty(2, self.block, vocab, dtype=torch.promote_types(dtype, torch.float32))

    def chunks(self) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        """(scores of the chunk, their x of each term, raw logits [rows, vocab]); the logits are one buffer."""
        scores = self.index.shape[0]
        rows = min(self.chunk, scores)
        buffer = torch.empty(rows, self.terms[0].weight.shape[0], dtype=self.dtype, device=self.index.device)
        for start in range(0, scores, max(rows, 1)):
            span = slice(start, min(start + rows, scores))
            xs = [term.x.index_select(0, self.index[span]).to(self.dtype) for term in self.terms]
            logits = buffer[: span.stop - start]
            torch.mm(xs[0], self.terms[0].weight.t(), out=logits)
            for x, term in zip(xs[1:], self.terms[1:], strict=True):
                logits.addmm_(x, term.weight.t())
            if self.bias is not None:
                logits += self.bias
            yield span, xs, logits

    def few(self) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        """As `chunks`, all at once, with the weight in bands, which is faster for few scores on a CPU."""
        xs = [term.x.index_select(0, self.index).to(self.dtype) for term in self.terms]
        logits = _in_bands(xs[0], self.terms[0].weight)
        for x, term in zip(xs[1:], self.terms[1:], strict=True):
            logits += _in_bands(x, term.weight)
        if self.bias is not None:
            logits += self.bias
        yield slice(0, len(self.index)), xs, logits

    def blocks(self, span: slice, logits: Tensor) -> Iterator[tuple[slice, Rows]]:
        """Rows of a chunk that are worked on together: (their scores, the rows)."""
        for start in range(0, logits.shape[0], self.block):
            part = logits[start : start + self.block]
            scores = slice(span.start + start, span.start + start + part.shape[0])
            yield scores, rows_of(part, self.target[scores], self.projection, self.want, self.scratch)


def _in_bands(x: Float[Tensor, "rows hidden"], weight: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "rows vocab"]:
    """Their product, a band of the weight after the other."""
    whole = len(weight) // BANDS * BANDS
    if whole == 0:
        return x @ weight.t()
    bands = weight[:whole].unflatten(0, (BANDS, -1)).transpose(1, 2)
    product = torch.bmm(x.expand(BANDS, *x.shape), bands).transpose(0, 1).reshape(len(x), whole)
    return product if whole == len(weight) else torch.cat([product, x @ weight[whole:].t()], dim=1)


class _Gradients:
    """Where the gradients of the terms and the bias are summed up."""

    def __init__(self, head: ChunkedHead, terms: Sequence[Term], bias: Tensor | None, needs: Sequence[bool], sinks):
        needs_bias, *needs_terms = needs
        self.head = head
        self.bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        self.xs = [torch.zeros_like(t.x) if n else None for t, n in zip(terms, needs_terms[::2], strict=True)]
        self.weights = [
            (torch.zeros_like(t.weight) if sink is None else sink) if n else None
            for t, n, sink in zip(terms, needs_terms[1::2], sinks, strict=True)
        ]

    def add(self, span: slice, xs: Sequence[Tensor], slope: Tensor) -> None:
        """Takes in a chunk: `slope` [rows, vocab] is the gradient at its raw logits."""
        for number, (x, term) in enumerate(zip(xs, self.head.terms, strict=True)):
            into_x, into_weight = self.xs[number], self.weights[number]
            if into_x is not None:
                into_x.index_add_(0, self.head.index[span], (slope @ term.weight).to(into_x.dtype))
            if into_weight is not None:
                _add_product(into_weight, slope, x)
        if self.bias is not None:
            self.bias += slope.sum(0)


def _add_product(into: Tensor, slope: Tensor, x: Tensor) -> None:
    """into += slope.T @ x, without a second tensor of that size where the dtypes differ."""
    if into.dtype == x.dtype:
        into.addmm_(slope.t(), x)
        return
    for part, columns in zip(into.split(8192), slope.split(8192, dim=1), strict=True):
        part += columns.t() @ x


def _leaves(terms: Sequence[Term]) -> list[Tensor | None]:
    """The weights that may take their gradient directly; None for the others."""
    return [t.weight if takes_gradient_in_place(t.weight) else None for t in terms]


def _sinks(leaves: Sequence[Tensor | None], accumulate: bool) -> list[Tensor | None]:
    """The `.grad` of each weight that takes its gradient directly, made if it is not there yet."""
    sinks: list[Tensor | None] = []
    for weight in leaves:
        if weight is None or not accumulate:
            sinks.append(None)
            continue
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        sinks.append(weight.grad)
    return sinks


def _returned(gradients: _Gradients, sinks: Sequence[Tensor | None]) -> list[Tensor | None]:
    weights = [None if s is not None else w for w, s in zip(gradients.weights, sinks, strict=True)]
    return [tensor for pair in zip(gradients.xs, weights, strict=True) for tensor in pair]


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, index, target, bias, *flat):
        terms = _pairs(flat)
        head = ChunkedHead(spec, index, target, bias, terms)
        columns: list[RowStats] = []
        with torch.autocast(index.device.type, enabled=False):
            for span, _, logits in head.chunks():
                columns += [rows.stats(spec.want, keep=False) for _, rows in head.blocks(span, logits)]
        logprobs, entropies, means, top1, lse, collisions = _joined(columns, terms[0].x)
        ctx.spec, ctx.dtype = spec, head.dtype
        # What comes back from under hooks for saved tensors is not the parameter itself, and has no `.grad` of its own.
        ctx.leaves = _leaves(terms)
        ctx.save_for_backward(index, target, bias, lse, entropies, *flat)
        ctx.set_materialize_grads(False)  # statistics that are only looked at cost nothing in backward
        ctx.mark_non_differentiable(top1, collisions)
        return logprobs, entropies, means, top1, collisions

    @staticmethod
    def backward(ctx, *grads):
        of_logprobs, of_entropies, of_means, *_ = grads
        index, target, bias, lse, entropies, *flat = ctx.saved_tensors
        terms, spec = _pairs(flat), ctx.spec
        of_logprobs = torch.zeros_like(lse) if of_logprobs is None else of_logprobs
        sinks = _sinks(ctx.leaves, spec.accumulate)
        with torch.autocast(index.device.type, dtype=ctx.dtype, enabled=ctx.dtype != terms[0].x.dtype):
            head = ChunkedHead(spec, index, target, bias, terms)
        gradients = _Gradients(head, terms, bias, ctx.needs_input_grad[3:], sinks)
        with torch.autocast(index.device.type, enabled=False):
            for span, xs, logits in head.chunks():
                for part, rows in head.blocks(span, logits):
                    rows.restore(lse[part], keep=of_entropies is not None)
                    slopes = Slopes(
                        of_logprobs[part],
                        None if of_entropies is None else of_entropies[part],
                        None if of_means is None else of_means[part],
                    )
                    rows.gradient(slopes, entropies if of_entropies is None else entropies[part])
                gradients.add(span, xs, logits)
        return None, None, None, gradients.bias, *_returned(gradients, sinks)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, loss: _Loss, index, target, bias, *flat):
        terms = _pairs(flat)
        needs = [need and spec.grad for need in ctx.needs_input_grad[4:]]
        head = ChunkedHead(spec, index, target, bias, terms)
        ctx.leaves = _leaves(terms)
        sinks = [None if leaf is None or not spec.accumulate else leaf.grad for leaf in ctx.leaves]
        gradients = _Gradients(head, terms, bias, needs, sinks)
        total = torch.zeros((), dtype=torch.promote_types(terms[0].x.dtype, torch.float32), device=index.device)
        columns: list[RowStats] = []
        with torch.autocast(index.device.type, enabled=False):
            for span, xs, logits in head.chunks():
                for _, rows in head.blocks(span, logits):
                    stats = rows.stats(spec.want, keep=any(needs) and spec.want.entropies)
                    columns.append(stats)
                    losses, slopes = _score_losses(loss, stats, spec.want)
                    total += losses
                    if any(needs):
                        rows.gradient(slopes, stats.entropies)
                if any(needs):
                    gradients.add(span, xs, logits)
        ctx.sinks, ctx.accumulate, ctx.grad_scale = sinks, spec.accumulate, loss.grad_scale
        ctx.gradients = gradients
        logprobs, entropies, means, top1, _, collisions = _joined(columns, terms[0].x)
        ctx.mark_non_differentiable(logprobs, entropies, means, top1, collisions)
        return total, logprobs, entropies, means, top1, collisions

    @staticmethod
    def backward(ctx, *grads):
        gradients, rest = ctx.gradients, grads[0] / ctx.grad_scale
        assert gradients is not None, "the gradients of linear_loss are formed once and used once"
        ctx.gradients = None
        for sink, tensor in [
            *((None, t) for t in (gradients.bias, *gradients.xs)),
            *zip(ctx.sinks, gradients.weights, strict=True),
        ]:
            if sink is None and tensor is not None:
                tensor.mul_(rest)
        sinks = list(ctx.sinks)
        for number, leaf in enumerate(ctx.leaves):
            # Set here rather than returned, so that a tied embedding can add to it and no second copy waits.
            if ctx.accumulate and leaf is not None and sinks[number] is None and gradients.weights[number] is not None:
                leaf.grad = sinks[number] = gradients.weights[number]
        return None, None, None, None, gradients.bias, *_returned(gradients, sinks)


def _score_losses(loss: _Loss, stats: RowStats, want: Want) -> tuple[Float[Tensor, ""], Slopes]:
    """`factor` times the sum of the losses, and `grad_scale` times its gradients at the statistics."""
    with torch.enable_grad():
        logprobs = stats.logprobs.detach().requires_grad_()
        entropies = stats.entropies.detach().requires_grad_() if want.entropies else None
        means = stats.mean_logprobs.detach().requires_grad_() if want.mean_logprobs else None
        leaves = [leaf for leaf in (logprobs, entropies, means) if leaf is not None]
        known = TokenStats(logprobs, entropies, means, stats.top1 if want.top1 else None)
        total = loss.of_stats(known).sum() * loss.factor
        slopes = iter(torch.autograd.grad(total * loss.grad_scale, leaves, allow_unused=True))
    of_logprobs = next(slopes)
    of_entropies = next(slopes) if entropies is not None else None
    of_means = next(slopes) if means is not None else None
    of_logprobs = torch.zeros_like(logprobs) if of_logprobs is None else of_logprobs
    return total.detach(), Slopes(of_logprobs, of_entropies, of_means)


def _joined(columns: Sequence[RowStats], like: Tensor) -> RowStats:
    if columns:
        return RowStats(*(torch.cat(column) for column in zip(*columns, strict=True)))
    empty = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    return RowStats(empty, empty.clone(), empty.clone(), empty.bool(), empty.clone(), empty.clone())
