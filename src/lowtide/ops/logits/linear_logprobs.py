"""Log-probabilities of chosen tokens from hidden states, without the logits.

The only loop over the vocabulary in the project. A chunk of scored positions at a time meets the head's weight;
each row of logits is reduced to a handful of numbers (`ops.logits.logit_rows`) and forgotten. Two ways to the gradient:

- `linear_logprobs` keeps the log-sum-exp of each score and computes the logits once more in backward
  (8 N V H FLOPs in all), as in Cut Cross-Entropy (arXiv 2411.09009). It serves any objective. The last chunk is not
  computed again: its memory is kept for backward, which needs as much and begins with it, so that of few scores it is
  6 N V H. Where no weight takes a gradient, those of hidden states are formed in forward, but for a factor that
  backward brings (4 N V H in place of 6).
- `linear_loss` is for objectives whose loss at a score depends on that score alone, such as supervised
  fine-tuning: gradients are formed in forward while the logits are there (6 N V H), as in Liger (2410.10989). It also
  takes a teacher, whose logits are made chunk by chunk beside the student's, and compares the two distributions, over
  one vocabulary or over two.

Where the rows of the weights lie on several ranks, these call it together (see `ops.logits.split_vocabulary`), and the
loop is the same one: over the scores of all of them and the rows that lie here.

Logits are `scale * (sum of x @ weight.T over the terms + bias)`, soft-capped, over the temperature. There is one
term for a plain head and a second one for a low-rank adapter on it.

Shapes: `scores` positions that are predicted from, `vocab`, `hidden`. All statistics are in float32 (float64 for
float64 input).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack, cast

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from lowtide.ops import few_rows
from lowtide.ops.in_place import (
    announce,
    lies_here,
    lying_as,
    needs_gradient,
    takes_gradient_in_place,
)
from lowtide.ops.logits.across_vocabularies import Across, Merged, Spans
from lowtide.ops.logits.compared_rows import ComparedRows, Comparison, NamedRows
from lowtide.ops.logits.logit_rows import Named, Projection, RowStats, Slopes, Support, TorchRows, Want
from lowtide.ops.logits.rows_of import Rows, rows_of
from lowtide.ops.logits.split_vocabulary import SplitRows, SplitScores, SplitVocabulary
from lowtide.ops.mapped import bands, is_mapped
from lowtide.ops.narrow_linear import AS_THEY_ARE, filled_up, recurring
from lowtide.ops.target import autocast_dtype, in_turn, target_of, without_autocast

CAST_BYTES = 3 << 20
"""Of a weight's gradient, whose product is cast at a time: smaller than what a heap has mapped anew for each."""
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Workspace for a chunk's logits: large enough for an efficient matmul, small beside everything else."""
ENOUGH_ROWS = 256
"""Scores of a chunk in 16 bits on a CPU, above which half the workspace does: with fewer, adding each chunk's product
to a weight's gradient in float32 takes longer than the products. Beside such a gradient there are twice as many, if
their logits take no more than half of the weight in 16 bits."""
FEW_ROWS = 32
"""Scores up to which a CPU multiplies the weight band by band."""
BANDS = 32
"""So many bands of a weight, each a product of its own: 5.6 ms in place of 11.4 for 8 scores and 9.6 for 18.5 for 32
(32,000 x 384 in float32, two cores, MKL), and no slower in bfloat16."""
BLOCK_BYTES = 2 << 20
"""On a CPU the passes over a chunk's logits go in blocks that stay in the second-level cache."""
COMPARED_BYTES = 32 << 20
"""Elsewhere a student's logits are compared with a teacher's in blocks of so many bytes, small beside a chunk."""


def chunk_rows(vocab: int, dtype: torch.dtype, kind: str, *, split: bool = False) -> int:
    """Scores of a chunk whose logits are in a dtype, on a kind of device.

    Args:
        vocab: the vocabulary, or its rows that lie here.
        split: whether other ranks hold other rows of it: a block is a whole chunk there.
    """
    dtype = _of_blocks(dtype, kind) if split else dtype
    most = CHUNK_BYTES.get(kind, CHUNK_BYTES["cuda"]) // (vocab * dtype.itemsize)
    if kind == "cpu" and dtype.itemsize == 2:  # whose products take packed copies beside
        most = max(most // 2, min(most, ENOUGH_ROWS))
        most -= most % AS_THEY_ARE
    return max(16, most)


def _of_blocks(dtype: torch.dtype, kind: str) -> torch.dtype:
    """In which the passes over a block of logits compute: at least in float32, but for kernels that have no copy."""
    return dtype if kind == "cuda" else torch.promote_types(dtype, torch.float32)


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
    divergences: Float[Tensor, " scores"] | None = None
    """Generalized Jensen-Shannon divergence from a teacher's distribution, in nats (see `ops.logits.compared_rows`)."""
    span_slopes: Float[Tensor, " scores"] | None = None
    """Between two vocabularies: the gradients of these at the log-probabilities of the other tokens of each span."""
    old: Float[Tensor, " scores"] | None = None
    """Log-probabilities of the policy that wrote, where the batch knows them. Given, and without gradient."""


PLAIN = Projection()
NOTHING_MORE = Want()


@dataclass(frozen=True)
class Teacher:
    """Whose distributions a student's are compared with, score by score. It gets no gradient."""

    terms: Sequence[Term]
    """Whose products make its logits; hidden states of the scores alone, in their order."""
    bias: Float[Tensor, " vocab"] | None = None
    projection: Projection = PLAIN
    """The temperature is commonly the student's."""
    beta: float = 0.5
    """0 is KL(teacher || student), 1 is KL(student || teacher)."""
    split: SplitVocabulary | None = None
    """The ranks that hold the rows of its weights; where the student's are whole, ranks with the same scores."""
    support: Support | None = None
    """The tokens that are compared, of whole vocabularies; None for all."""
    across: Across | None = None
    """It has another vocabulary, which is whole as the student's, and this is how they are compared."""
    spans: Spans | None = None
    """Then: the spans of the scores, of each of which one has the distribution, and alone a hidden state here that is
    read. None where each score is one."""
    merged: tuple[Float[Tensor, " scores"], Float[Tensor, " scores"]] | None = None
    """Of scores that are spans each: the log-probabilities of the other tokens, the student's and its own."""
    named: Named | None = None
    """All that is known of it, in place of `terms`: the tokens that it names at each score, which `support` is of.
    The student's vocabulary is whole then."""


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
    old: Float[Tensor, " scores"] | None
    """What a loss of `linear_loss` finds as `TokenStats.old`."""
    chunk: int | None
    """Scores at a time; by default as many as fit the device's workspace."""
    split: SplitVocabulary | None
    """The ranks that hold the rows of the weights and of the bias, which are `DTensor`s then. The gradient with which
    a loss goes backward has to be the same on all of them."""


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
        options: see `HeadOptions`; of what `want` asks for, all but `top1` and `collisions` carries gradients, and
            `divergences` are `linear_loss`'s alone.
    """
    bias = options.pop("bias", None)
    spec = _Spec(**cast(Any, options), grad=torch.is_grad_enabled())
    wanted = spec.grad and any(term.x.requires_grad for term in terms)
    spec = spec._replace(at_once=wanted and forms_in_forward(terms, bias, spec.want, spec.split))
    return _wanted(spec.want, *_LinearLogprobs.apply(spec, index, target, bias, *_flat(terms)))


def forms_in_forward(terms: Sequence[Term], bias: Tensor | None, want: Want, split: SplitVocabulary | None) -> bool:
    """Whether `linear_logprobs` reads no weight in backward: none takes a gradient, nor can statistics beside
    log-probabilities have one, and no rows lie on other ranks.

    Args:
        terms: as there.
        bias: likewise.
        want: the statistics beside log-probabilities.
        split: the ranks that hold the rows of the weights.
    """
    trained = any(term.weight.requires_grad for term in terms) or (bias is not None and bias.requires_grad)
    others = trained or want.entropies or want.mean_logprobs or split is not None
    return not others and _holds_slopes_of_one(_dtype_of(terms[0].x))


def linear_loss(
    terms: Sequence[Term],
    index: Int[Tensor, " scores"],
    target: Int[Tensor, " scores"],
    loss: ScoreLoss,
    *,
    factor: float | Tensor = 1.0,
    grad_scale: float = 1.0,
    teacher: Teacher | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Tensor, ""], TokenStats]:
    """`factor` times the sum of `loss` over the scores, and the statistics without gradient.

    Args:
        loss: from statistics to losses, score by score.
        factor: of the sum, such as one over the number of scores, or of each loss, [scores]; its gradient is not taken.
        grad_scale: the gradient with which `backward` will be called, by a loss scaler for float16 training say. The
            gradients are formed so much larger, so that small ones do not underflow before they are scaled. Another
            gradient than this one in `backward` is right as well, without that benefit.
        teacher: whom `divergences` are from, where `want` asks for them; where a vocabulary is split, without
            `mean_logprobs`. One more chunk of logits is held, the teacher's.
        accumulate: a weight that is a leaf and already has a `.grad` receives its gradient in *forward*, which is
            right only if `backward` follows at once with a gradient of `grad_scale`.

    The other arguments are those of `linear_logprobs`.
    """
    if teacher is not None and teacher.spans is not None:
        how: dict[str, Any] = {"factor": factor, "grad_scale": grad_scale, **options}
        return _spanned_loss(terms, index, target, loss, teacher, teacher.spans, how)
    bias, old = options.pop("bias", None), options.pop("old", None)
    spec = _Spec(**cast(Any, options), grad=torch.is_grad_enabled(), teacher=teacher)
    assert spec.want.divergences == (teacher is not None)
    if teacher is not None:
        assert spec.split is None or not spec.want.mean_logprobs
        assert spec.split is not None or teacher.split is None or teacher.split.same_scores
        assert teacher.across is None or (spec.split is None and teacher.split is None)
        assert teacher.named is None or spec.split is None
    total, *stats = _LinearLoss.apply(spec, _Loss(loss, factor, grad_scale, old), index, target, bias, *_flat(terms))
    across = teacher is not None and teacher.across is not None
    return total, _wanted(spec.want, *(stats if across else stats[:-1]))


def read_logits(
    terms: Sequence[Term],
    index: Int[Tensor, " scores"],
    read: Callable[[Float[Tensor, "rows vocab"], slice], Num[Tensor, "numbers rows"]],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    projection: Projection = PLAIN,
    split: SplitVocabulary | None = None,
) -> Num[Tensor, "numbers scores"]:
    """What a function reads off the logits, a chunk of scores at a time: for tokens that are drawn, not given.

    Args:
        terms: whose products make the logits; hidden states of all tokens.
        index: the token whose hidden state predicts each score.
        read: called with a chunk's logits, at least in float32, which it may overwrite, and its place among the scores.
        split: the ranks that hold the rows of the weights, and the same scores.
    """
    spec = _Spec(projection)
    head = ChunkedHead(spec, _scores_of(spec, index, index, terms), bias, terms)
    with without_autocast(index.device):
        chunks = head.few() if len(index) <= FEW_ROWS and index.device.type == "cpu" else head.chunks()
        found = []
        for span, _, logits in chunks:
            logits = logits if split is None else split.all_columns(logits)
            found.append(read(TorchRows(logits[: _count(span)], index[span], projection).x, span))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


# -- spans of text -----------------------------------------------------------------------------------------------------


def _spanned_loss(
    terms: Sequence[Term],
    index: Int[Tensor, " scores"],
    target: Int[Tensor, " scores"],
    loss: ScoreLoss,
    teacher: Teacher,
    spans: Spans,
    how: dict[str, Any],
) -> tuple[Float[Tensor, ""], TokenStats]:
    """`linear_loss` of the spans of scores: of each one has the distribution, times the probabilities of the others.
    `how` are its further arguments; log-probabilities and distances are 0 of scores that have none."""
    merged, count, factor = Merged.of(spans), len(index), how["factor"]
    plain = {name: value for name, value in how.items() if name not in ("factor", "grad_scale", "want", "old")}
    known = slice(None) if spans.likelihood is not None else merged.others
    found = linear_logprobs(terms, index[known], target[known], **plain).logprobs
    others = found if spans.likelihood is None else found[merged.others]
    if isinstance(factor, Tensor) and factor.dim():
        how = {**how, "factor": factor[merged.place]}
    states = [Term(x[merged.place], weight) for x, weight in teacher.terms]
    kept: list[TokenStats] = []

    def of_spans(together: Tensor) -> tuple[Tensor, Tensor]:
        beside = replace(teacher, terms=states, spans=None, merged=(together, spans.theirs[merged.place]))
        total, stats = linear_loss(terms, index[merged.place], target[merged.place], loss, teacher=beside, **how)
        kept.append(stats)
        if not len(merged.place):
            return total, found.new_zeros(0)
        assert stats.divergences is not None
        assert stats.span_slopes is not None
        with torch.enable_grad():
            leaf = stats.divergences.detach().requires_grad_()
            (slope,) = torch.autograd.grad((loss(replace(stats, divergences=leaf)) * how["factor"]).sum(), leaf)
        return total, slope * stats.span_slopes

    total = merged.loss(count, others, of_spans)
    if spans.likelihood is not None:
        total = total - (found * spans.likelihood.to(found)).sum().to(total)
    (stats,), nothing = kept, found.detach().new_zeros(count)
    assert stats.divergences is not None
    of_others = nothing.index_copy(0, merged.others, others.detach())
    logprobs, distances = (
        into.index_copy(0, merged.place, each.to(into))
        for into, each in ((of_others, stats.logprobs), (nothing, stats.divergences))
    )
    return total, TokenStats(logprobs, divergences=distances)


# -- inside ------------------------------------------------------------------------------------------------------


class _Spec(NamedTuple):
    projection: Projection = PLAIN
    want: Want = NOTHING_MORE
    accumulate: bool = False
    chunk: int | None = None
    split: SplitVocabulary | None = None
    grad: bool = True
    """Whether gradients are wanted at all, which the inside of an autograd function cannot see."""
    teacher: Teacher | None = None
    at_once: bool = False
    """Whether those of hidden states are formed in forward."""


class _Loss(NamedTuple):
    of_stats: ScoreLoss
    factor: float | Tensor
    grad_scale: float
    old: Tensor | None = None

    def summed(self, losses: Tensor, own: slice) -> Tensor:
        """The sum of the losses of some of this rank's scores, times their factor."""
        if isinstance(self.factor, Tensor) and self.factor.dim():
            return (losses * self.factor[own]).sum()
        return losses.sum() * self.factor


def _wanted(
    want: Want,
    logprobs: Tensor,
    entropies: Tensor,
    means: Tensor,
    top1: Tensor,
    collisions: Tensor,
    divergences: Tensor | None = None,
    span_slopes: Tensor | None = None,
) -> TokenStats:
    return TokenStats(
        logprobs,
        entropies if want.entropies else None,
        means if want.mean_logprobs else None,
        top1 if want.top1 else None,
        collisions if want.collisions else None,
        divergences if want.divergences else None,
        span_slopes,
    )


def _flat(terms: Sequence[Term]) -> list[Tensor]:
    return [tensor for term in terms for tensor in term]


def _pairs(flat: Sequence[Tensor]) -> tuple[Term, ...]:
    return tuple(Term(x, weight) for x, weight in zip(flat[::2], flat[1::2], strict=True))


class OwnScores:
    """This rank's scores, for a head whose rows of the vocabulary all lie here, or on ranks that hold the same scores;
    `SplitScores` has all ranks'."""

    factor = 1.0
    """Of the gradients of weights."""

    def __init__(
        self,
        index: Int[Tensor, " scores"],
        target: Int[Tensor, " scores"],
        most_at_once: int,
        split: SplitVocabulary | None,
    ) -> None:
        self.index, self.target, self.split = index, target, split
        self.rows = min(len(index), most_at_once)

    def spans(self) -> Iterator[slice]:
        """The scores of each chunk: as many as there can be, so that fewer scores never take more memory; fewer in the
        first, since the last is not computed again."""
        first = len(self.index) % max(self.rows, 1)
        yield from [slice(0, first)] if first else []
        for start in range(first, len(self.index), max(self.rows, 1)):
            yield slice(start, start + self.rows)

    def taken(self, x: Tensor, span: slice, dtype: torch.dtype) -> Tensor:
        """The hidden states of a chunk."""
        return x.index_select(0, self.index[span]).to(dtype)

    def add_back(self, into: Tensor, span: slice, x: Tensor) -> None:
        """Adds up the gradients of a chunk's hidden states."""
        into.index_add_(0, self.index[span], x if self.split is None else self.split.summed(x))

    def own_span(self, span: slice) -> slice:
        """Which of this rank's scores are in a part of a chunk."""
        return span

    def of_own(self, stats: RowStats, span: slice) -> RowStats:
        """Those of this rank, of the statistics of a part of a chunk; the other two, of all scores, likewise."""
        return stats

    def of_everyone(self, slopes: Slopes) -> Slopes:
        return slopes

    def own(self, everyones: Tensor) -> Tensor:
        return everyones

    def slopes_of_all(self, slopes: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return slopes


AllScores: TypeAlias = OwnScores | SplitScores


def _in_order(scores: AllScores) -> AllScores:
    """The same scores, for hidden states of scores alone."""
    found = copy.copy(scores)
    found.index = torch.arange(len(scores.index), device=scores.index.device)
    return found


def _scores_of(spec: _Spec, index: Tensor, target: Tensor, terms: Sequence[Term]) -> AllScores:
    """Whose scores a head goes through, and how many at a time."""
    first, split = terms[0].x, spec.split
    vocab = terms[0].weight.shape[0] if split is None else split.each
    kind = target_of(first).kind
    dtype = _dtype_of(first)
    most = spec.chunk or chunk_rows(vocab, dtype, kind, split=split is not None)
    if kind == "cpu" and spec.chunk is None and split is None and _is_summed_wider(terms, dtype):
        most = max(most, min(2 * ENOUGH_ROWS, terms[0].weight.shape[1] // 2))
    if split is not None and spec.chunk is None and _copies_blocks(spec, kind):
        most = max(most // 3, 1)  # a block is a whole chunk there, and has two copies
    if split is None or split.same_scores:
        return OwnScores(index, target, most, split)
    return SplitScores(split, index, target, most)


def _is_summed_wider(terms: Sequence[Term], dtype: torch.dtype) -> bool:
    """Whether products in 16 bits are added to the gradient of a weight in float32."""
    return any(term.weight.requires_grad and term.weight.dtype.itemsize > dtype.itemsize == 2 for term in terms)


def _holds_slopes_of_one(dtype: torch.dtype) -> bool:
    """Whether gradients of log-probabilities can be formed before their factor is known: in float16 small
    probabilities are nothing without it."""
    return dtype != torch.float16


def _copies_blocks(spec: _Spec, kind: str) -> bool:
    """Whether the passes over a block of logits need two more of its size."""
    beside = spec.want.divergences and (spec.teacher is None or spec.teacher.named is None)
    twice = spec.want.entropies or spec.want.collisions or beside
    return kind == "cpu" and (twice or spec.projection.softcap is not None)


def _count(span: slice) -> int:
    """Of the scores in a span."""
    return span.stop - span.start


def _dtype_of(x: Tensor) -> torch.dtype:
    """The dtype of the matmuls."""
    return autocast_dtype(x.device) or x.dtype


class ChunkedHead:
    """The terms in the dtype of the matmuls, and the loop over chunks of scores."""

    def __init__(self, spec: _Spec, scores: AllScores, bias: Tensor | None, terms: Sequence[Term]):
        first, kind = terms[0].x, target_of(terms[0].x).kind
        self.dtype, self.scores, self.split = _dtype_of(first), scores, spec.split
        self.terms = [Term(x, lies_here(weight).to(self.dtype)) for x, weight in terms]
        self.bias = None if bias is None else lies_here(bias)
        self.projection, self.want = spec.projection, spec.want
        self.vocab = len(self.terms[0].weight)
        self.recurs = kind == "cpu" and self.dtype.itemsize == 2 and self.split is None
        self.teacher, self.theirs = spec.teacher, iter(())
        if spec.teacher is not None and spec.teacher.named is None:
            self.theirs = self._logits_of(spec.teacher)
        block_bytes = BLOCK_BYTES if kind == "cpu" else None if spec.teacher is None else COMPARED_BYTES
        if spec.split is not None or block_bytes is None:  # what ranks found is put together once a chunk
            self.block = scores.rows
        else:
            row_bytes = self.vocab * _of_blocks(self.dtype, kind).itemsize
            self.block = min(max(1, block_bytes // row_bytes), max(scores.rows, 1))
        self.scratch = None
        if _copies_blocks(spec, kind):
            wide = torch.promote_types(self.dtype, torch.float32)
            self.scratch = torch.empty(2, self.block, self.vocab, dtype=wide)

    def _logits_of(self, teacher: Teacher) -> Iterator[Tensor]:
        """A teacher's raw logits, chunk by chunk; they are one buffer."""
        ours, theirs, bias, terms = self.split, teacher.split, teacher.bias, teacher.terms
        if ours is not None and theirs is None:
            terms = [Term(x, ours.own_rows(weight)) for x, weight in terms]
            bias = None if bias is None else ours.own_rows(bias)
        head = ChunkedHead(_Spec(teacher.projection), _in_order(self.scores), bias, terms)
        return (_columns(logits, ours, theirs) for _, _, logits in head.chunks())  # without `self`, which holds this

    def _rows_for(self, scores: int) -> int:
        """How many rows the products of so many scores are made of."""
        return recurring(scores) if self.recurs else scores

    def workspace(self) -> Float[Tensor, "rows vocab"]:
        """For the logits of a chunk."""
        shape = (self._rows_for(self.scores.rows), self.vocab)
        return torch.empty(shape, dtype=self.dtype, device=self.scores.index.device)

    def chunks(
        self, buffer: Tensor | None = None, kept: slice | None = None
    ) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        """(scores of the chunk, their x of each term, raw logits [rows, vocab]); both may be filled up with rows that
        are no score's, whose x is 0.

        Args:
            buffer: that the logits are written to, chunk after chunk.
            kept: a chunk whose rows in the buffer are left as they are; it comes first.
        """
        scores, buffer = self.scores, self.workspace() if buffer is None else buffer
        spans = [span for span in scores.spans() if span != kept]
        for span in spans if kept is None else [kept, *spans]:
            rows = self._rows_for(_count(span))
            xs = [filled_up(scores.taken(term.x, span, self.dtype), rows, self.dtype) for term in self.terms]
            logits = buffer[:rows]
            if span is not kept:
                for x, term in zip(xs, self.terms, strict=True):
                    _put_logits(logits, x, term.weight, add=x is not xs[0])
                if self.bias is not None:
                    logits += self.bias
            yield span, xs, logits

    def few(self) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
        """As `chunks`, all at once, with the weight in bands, which is faster for few scores on a CPU."""
        everyone = slice(0, len(self.scores.index))
        xs = [self.scores.taken(term.x, everyone, self.dtype) for term in self.terms]
        logits = _in_bands(xs[0], self.terms[0].weight)
        for x, term in zip(xs[1:], self.terms[1:], strict=True):
            logits += _in_bands(x, term.weight)
        if self.bias is not None:
            logits += self.bias
        yield everyone, xs, logits

    def blocks(self, span: slice, logits: Tensor) -> Iterator[tuple[slice, Rows | SplitRows]]:
        """Rows of a chunk that are worked on together: (their scores, the rows)."""
        theirs = next(self.theirs, None)
        count = _count(span)
        starts = range(0, count, self.block)
        for start in in_turn(starts) if self.split is None and self.teacher is None else starts:
            part = logits[start : min(start + self.block, count)]
            scores = slice(span.start + start, span.start + start + part.shape[0])
            target = self.scores.target[scores]
            beside = None if theirs is None else theirs[start : start + part.shape[0]]
            if self.split is None:
                yield scores, self._rows(part, beside, scores, target)
            else:
                of = functools.partial(self._rows, part, beside, scores, vocab=self.split.vocab)
                yield scores, SplitRows(self.split, target, of)

    def _rows(
        self, part: Tensor, theirs: Tensor | None, scores: slice, target: Tensor, vocab: int | None = None
    ) -> Rows:
        if self.teacher is not None and self.teacher.named is not None:
            assert self.teacher.support is not None
            named = Named(*(each[scores] for each in self.teacher.named))
            how = {"named": named, "support": self.teacher.support, "beta": self.teacher.beta}
            return NamedRows(part, target, self.projection, self.scratch, **how)
        if self.teacher is None or theirs is None:
            return rows_of(part, target, self.projection, self.want, self.scratch, vocab)
        merged = self.teacher.merged
        return ComparedRows(
            part,
            target,
            self.projection,
            self.scratch,
            teacher=theirs,
            how=Comparison(
                self.teacher.projection,
                self.teacher.beta,
                self.teacher.support,
                self.teacher.across,
                None if merged is None else (merged[0][scores], merged[1][scores]),
            ),
            vocab=vocab,
        )


def _columns(
    logits: Float[Tensor, "rows theirs"], ours: SplitVocabulary | None, theirs: SplitVocabulary | None
) -> Float[Tensor, "rows ours"]:
    """A teacher's logits of the tokens whose logits of the student lie here."""
    if theirs is None or (ours is not None and ours.vocab == theirs.vocab):
        return logits
    logits = theirs.all_columns(logits)
    return logits if ours is None else ours.own_rows(logits.T).T


def _put_logits(
    logits: Float[Tensor, "rows vocab"],
    x: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    *,
    add: bool = False,
) -> None:
    """logits = x @ weight.T, or that added; a mapped weight is resident by bands of rows."""
    for rows in bands(weight):
        part = logits[:, rows]
        if add:
            part.addmm_(x, weight[rows].t())
        else:
            torch.mm(x, weight[rows].t(), out=part)


def _back(slope: Float[Tensor, "rows vocab"], weight: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "rows hidden"]:
    """slope @ weight; of a mapped weight, a sum over bands of rows, at least in float32."""
    if not is_mapped(weight):
        return slope @ weight
    total = slope.new_zeros(len(slope), weight.shape[1], dtype=torch.promote_types(slope.dtype, torch.float32))
    for rows in bands(weight):
        total += slope[:, rows] @ weight[rows]
    return total


def _in_bands(x: Float[Tensor, "rows hidden"], weight: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "rows vocab"]:
    """Their product, by a layout of the weight if it has one, or else a band of it after the other."""
    found = few_rows.product(x, weight)
    if found is not None:
        return found
    whole = len(weight) // BANDS * BANDS
    if is_mapped(weight):
        product = x.new_empty(len(x), len(weight))
        _put_logits(product, x, weight)
        return product
    if whole == 0:
        return x @ weight.t()
    parts = weight[:whole].unflatten(0, (BANDS, -1)).transpose(1, 2)
    product = torch.bmm(x.expand(BANDS, *x.shape), parts).transpose(0, 1).reshape(len(x), whole)
    return product if whole == len(weight) else torch.cat([product, x @ weight[whole:].t()], dim=1)


class _Gradients:
    """Where the gradients of the terms and the bias are summed up."""

    def __init__(self, head: ChunkedHead, terms: Sequence[Term], bias: Tensor | None, needs: Sequence[bool], sinks):
        needs_bias, *needs_terms = needs
        self.head = head
        self.bias = torch.zeros_like(lies_here(bias)) if needs_bias and bias is not None else None
        self.xs = [torch.zeros_like(t.x) if n else None for t, n in zip(terms, needs_terms[::2], strict=True)]
        made = torch.empty_like if head.scores.rows else torch.zeros_like
        self.weights = [
            (made(lies_here(t.weight)) if sink is None else sink) if n else None
            for t, n, sink in zip(terms, needs_terms[1::2], sinks, strict=True)
        ]
        self.fresh = [sink is None for sink in sinks]
        """Whether the gradient of a weight has nothing in it, which the first chunk overwrites."""

    def add(self, span: slice, xs: Sequence[Tensor], slope: Tensor) -> None:
        """Takes in a chunk: `slope` [rows, vocab] is the gradient at its raw logits, filled up as the chunk is."""
        count = _count(span)
        for number, (x, term) in enumerate(zip(xs, self.head.terms, strict=True)):
            into_x, into_weight = self.xs[number], self.weights[number]
            if into_x is not None:
                self.head.scores.add_back(into_x, span, _back(slope, term.weight)[:count].to(into_x.dtype))
            if into_weight is not None:
                _add_product(into_weight, slope, x, self.head.scores.factor, fresh=self.fresh[number])
                self.fresh[number] = False
        if self.bias is not None:
            self.bias.add_(slope[:count].sum(0), alpha=self.head.scores.factor)


def _add_product(into: Tensor, slope: Tensor, x: Tensor, factor: float, *, fresh: bool) -> None:
    """into += factor * slope.T @ x, without a second tensor of that size where the dtypes differ; what is `fresh` has
    nothing in it."""
    if into.dtype == x.dtype:
        into.addmm_(slope.t(), x, beta=0 if fresh else 1, alpha=factor)
        return
    rows = max(1, CAST_BYTES // (into.shape[1] * into.element_size()))
    for start in in_turn(range(0, len(into), rows)):
        part, product = into[start : start + rows], slope[:, start : start + rows].t() @ x
        if not fresh:
            part.add_(product, alpha=factor)
        elif factor == 1.0:
            part.copy_(product)
        else:
            torch.mul(product, factor, out=part)


class _Leaves(NamedTuple):
    """The weights that are parameters, None for the others."""

    direct: list[Tensor | None]
    """Those that may take their gradient directly."""
    hooked: list[Tensor | None]
    """Those whose gradient somebody waits for, so that autograd brings it."""

    @classmethod
    def of(cls, terms: Sequence[Term], accumulate: bool) -> _Leaves:
        own = [takes_gradient_in_place(t.weight) for t in terms]
        leaves = [t.weight if needs_gradient(t.weight) else None for t in terms]
        return cls(
            [leaf if accumulate and takes else None for leaf, takes in zip(leaves, own, strict=True)],
            [None if takes else leaf for leaf, takes in zip(leaves, own, strict=True)],
        )

    def sinks(self) -> list[Tensor | None]:
        """The `.grad` of each weight that takes its gradient directly, and has one already."""
        there = (None if leaf is None else leaf.grad for leaf in self.direct)
        return [None if grad is None else lies_here(grad) for grad in there]

    def take(self, made: Sequence[Tensor | None], sinks: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gives weights that take their gradient directly what was made for them, and says which ones autograd brings.

        What is set here, rather than returned, a tied embedding can add to, and no second copy waits.

        Returns:
            The sinks, with what was given now.
        """
        taken = list(sinks)
        for number, (leaf, gradient) in enumerate(zip(self.direct, made, strict=True)):
            if leaf is not None and gradient is not None and sinks[number] is None:
                if leaf.grad is None:
                    leaf.grad = lying_as(leaf, gradient)
                else:  # of another loss on the same weight, which came first
                    lies_here(leaf.grad).add_(gradient)
                taken[number] = gradient
        for leaf, gradient in zip(self.hooked, made, strict=True):
            if leaf is not None and gradient is not None:
                announce(leaf)
        return taken


class _Cut(NamedTuple):
    """The bias and the weights, where they are cut: gradients that are returned are cut likewise."""

    bias: Tensor | None
    weights: Sequence[Tensor | None]

    @classmethod
    def of(cls, bias: Tensor | None, terms: Sequence[Term], split: SplitVocabulary | None) -> _Cut:
        return cls(None, [None for _ in terms]) if split is None else cls(bias, [term.weight for term in terms])


def _returned(gradients: _Gradients, cut: _Cut, sinks: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the bias and the terms, but for what was added in place."""
    given = [None if s is not None else w for w, s in zip(gradients.weights, sinks, strict=True)]
    bias, *weights = (
        None if made is None else lying_as(as_this, made)
        for made, as_this in zip([gradients.bias, *given], [cut.bias, *cut.weights], strict=True)
    )
    return [bias, *(tensor for pair in zip(gradients.xs, weights, strict=True) for tensor in pair)]


class _LastChunk(NamedTuple):
    """Of the scores: what backward would compute again of it."""

    span: slice
    slopes: Float[Tensor, "rows vocab"]
    """Gradients at its raw logits where those at its log-probabilities are one; in a buffer for any chunk."""


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, index, target, bias, *flat):
        terms = _pairs(flat)
        scores = _scores_of(spec, index, target, terms)
        head = ChunkedHead(spec, scores, bias, terms)
        needed = [spec.grad and need for need in ctx.needs_input_grad[3:]]
        keeps = any(needed) and not spec.at_once and _holds_slopes_of_one(head.dtype)
        ctx.formed = _of_scores(scores, terms, needed[1::2]) if spec.at_once else []
        ctx.last, buffer = None, head.workspace()
        columns: list[RowStats] = []
        with torch.autocast(index.device.type, enabled=False):
            for span, _, logits in head.chunks(buffer):
                if keeps and span.stop >= len(scores.target):
                    ctx.last = _LastChunk(span, buffer)
                for _, rows in head.blocks(span, logits):
                    columns.append(rows.stats(spec.want, keep=False))
                    if spec.at_once or ctx.last is not None:
                        rows.gradient(Slopes(torch.ones_like(columns[-1].lse)), columns[-1].entropies)
                for into, term in zip(ctx.formed, head.terms, strict=False):
                    if into is not None:
                        into[span] = _back(logits, term.weight)[: _count(span)]
        stats = _joined(columns, terms[0].x, len(scores.index))
        logprobs, entropies, means, top1, _, collisions, *_ = map(scores.own, stats)
        ctx.spec, ctx.dtype = spec, head.dtype
        ctx.met = None if spec.split is None else scores  # what ranks told each other is not asked again
        # What comes back from under hooks for saved tensors is not the parameter itself, and has no `.grad` of its own.
        ctx.leaves = _Leaves.of(terms, spec.accumulate)
        ctx.save_for_backward(index, target, bias, stats.lse, stats.entropies, *flat)
        ctx.set_materialize_grads(False)  # statistics that are only looked at cost nothing in backward
        ctx.mark_non_differentiable(top1, collisions)
        return logprobs, entropies, means, top1, collisions

    @staticmethod
    def backward(ctx, *grads):
        index, target, bias, lse, entropies, *flat = ctx.saved_tensors
        terms, spec = _pairs(flat), ctx.spec
        with torch.autocast(index.device.type, dtype=ctx.dtype, enabled=ctx.dtype != terms[0].x.dtype):
            scores = ctx.met or _scores_of(spec, index, target, terms)
            head = None if spec.at_once else ChunkedHead(spec, scores, bias, terms)
        of_logprobs, of_entropies, of_means = scores.slopes_of_all(grads[:3])
        of_logprobs = torch.zeros_like(lse) if of_logprobs is None else of_logprobs
        if head is None:  # and no weight is read
            return None, None, None, None, *_spread(ctx.formed, of_logprobs, scores, terms)
        last, ctx.last = ctx.last if of_entropies is None and of_means is None else None, None
        buffer, kept = (head.workspace(), None) if last is None else (last.slopes, last.span)
        sinks = ctx.leaves.sinks()
        gradients = _Gradients(head, terms, bias, ctx.needs_input_grad[3:], sinks)
        with torch.autocast(index.device.type, enabled=False):
            for span, xs, logits in head.chunks(buffer, kept):
                if span is kept:
                    logits[: _count(span)].mul_(of_logprobs[span, None])
                else:
                    _slopes_of(head, span, logits, lse, entropies, (of_logprobs, of_entropies, of_means))
                gradients.add(span, xs, logits)
        sinks = ctx.leaves.take(gradients.weights, sinks)
        return None, None, None, *_returned(gradients, _Cut.of(bias, terms, spec.split), sinks)


def _of_scores(scores: AllScores, terms: Sequence[Term], needed: Sequence[bool]) -> list[Tensor | None]:
    """Room for a gradient of each score's hidden state, of those terms that need one."""
    pairs = zip(terms, needed, strict=True)
    return [term.x.new_empty(len(scores.index), term.x.shape[1]) if need else None for term, need in pairs]


def _spread(
    formed: Sequence[Tensor | None], slopes: Float[Tensor, " scores"], scores: AllScores, terms: Sequence[Term]
) -> list[Tensor | None]:
    """The gradients of the terms, from those of the scores where each log-probability's is one."""
    returned: list[Tensor | None] = []
    for of_scores, term in zip(formed, terms, strict=True):
        into = None if of_scores is None else torch.zeros_like(term.x)
        if of_scores is not None and into is not None:
            for span in scores.spans():
                scores.add_back(into, span, (of_scores[span] * slopes[span, None]).to(into.dtype))
        returned += [into, None]
    return returned


def _slopes_of(
    head: ChunkedHead,
    span: slice,
    logits: Float[Tensor, "rows vocab"],
    lse: Float[Tensor, " scores"],
    entropies: Tensor,
    slopes: tuple[Tensor, Tensor | None, Tensor | None],
) -> None:
    """Overwrites a chunk's raw logits with the gradients at them; `slopes` are those at all statistics."""
    of_logprobs, of_entropies, of_means = slopes
    for part, rows in head.blocks(span, logits):
        rows.restore(lse[part], keep=of_entropies is not None)
        of_part = Slopes(
            of_logprobs[part],
            None if of_entropies is None else of_entropies[part],
            None if of_means is None else of_means[part],
        )
        rows.gradient(of_part, entropies if of_entropies is None else entropies[part])


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, loss: _Loss, index, target, bias, *flat):
        terms = _pairs(flat)
        needs = [need and spec.grad for need in ctx.needs_input_grad[4:]]
        scores = _scores_of(spec, index, target, terms)
        head = ChunkedHead(spec, scores, bias, terms)
        ctx.leaves = _Leaves.of(terms, spec.accumulate)
        sinks = ctx.leaves.sinks()
        gradients = _Gradients(head, terms, bias, needs, sinks)
        total = torch.zeros((), dtype=torch.promote_types(terms[0].x.dtype, torch.float32), device=index.device)
        columns: list[RowStats] = []
        with torch.autocast(index.device.type, enabled=False):
            for span, xs, logits in head.chunks():
                for part, rows in head.blocks(span, logits):
                    stats = rows.stats(spec.want, keep=any(needs) and spec.want.entropies)
                    columns.append(stats)
                    losses, slopes = _score_losses(loss, scores.of_own(stats, part), spec.want, scores.own_span(part))
                    total += losses
                    if any(needs):
                        rows.gradient(scores.of_everyone(slopes), stats.entropies)
                if any(needs):
                    gradients.add(span, xs, logits)
        ctx.sinks, ctx.grad_scale = sinks, loss.grad_scale
        ctx.gradients, ctx.cut = gradients, _Cut.of(bias, terms, spec.split)
        logprobs, entropies, means, top1, _, *rest = map(scores.own, _joined(columns, terms[0].x, len(scores.index)))
        ctx.mark_non_differentiable(logprobs, entropies, means, top1, *rest)
        return total, logprobs, entropies, means, top1, *rest

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
        sinks = ctx.leaves.take(gradients.weights, ctx.sinks)
        return None, None, None, None, *_returned(gradients, ctx.cut, sinks)


def _score_losses(loss: _Loss, stats: RowStats, want: Want, own: slice) -> tuple[Float[Tensor, ""], Slopes]:
    """`factor` times the sum of the losses, and `grad_scale` times its gradients at the statistics, which are of the
    scores `own` of this rank."""
    with torch.enable_grad():
        logprobs = stats.logprobs.detach().requires_grad_()
        entropies = stats.entropies.detach().requires_grad_() if want.entropies else None
        means = stats.mean_logprobs.detach().requires_grad_() if want.mean_logprobs else None
        divergences = stats.divergences.detach().requires_grad_() if want.divergences else None
        leaves = [leaf for leaf in (logprobs, entropies, means, divergences) if leaf is not None]
        top1, old = stats.top1 if want.top1 else None, None if loss.old is None else loss.old[own].to(logprobs)
        known = TokenStats(logprobs, entropies, means, top1, divergences=divergences, old=old)
        total = loss.summed(loss.of_stats(known), own)
        slopes = iter(torch.autograd.grad(total * loss.grad_scale, leaves, allow_unused=True))
    of_logprobs = next(slopes)
    of_entropies = next(slopes) if entropies is not None else None
    of_means = next(slopes) if means is not None else None
    of_divergences = next(slopes) if divergences is not None else None
    of_logprobs = torch.zeros_like(logprobs) if of_logprobs is None else of_logprobs
    return total.detach(), Slopes(of_logprobs, of_entropies, of_means, of_divergences)


def _joined(columns: Sequence[RowStats], like: Tensor, count: int) -> RowStats:
    """Those of so many scores, from those of their blocks; a plan may have taken a few blocks for all."""
    if columns:
        found = RowStats(*(torch.cat(column) for column in zip(*columns, strict=True)))
        if len(found[0]) >= count:
            return found
        return RowStats(*(column.new_empty(count) if len(column) else column for column in found))
    empty = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    return RowStats(empty, empty.clone(), empty.clone(), empty.bool(), *(empty.clone() for _ in range(4)))
