"""A head and an embedding whose rows of the vocabulary lie on several ranks, each complete on none.

Hidden states travel in place of weights. In the head, the scored hidden states of all ranks come together a chunk at a
time. Each rank makes the logits of its rows of the vocabulary, and what the ranks find of a score is put together, as
in Megatron's vocabulary-parallel loss (arXiv 1909.08053). In backward each rank forms the gradient of its rows from the
scores of all ranks, and its part of the gradient of every hidden state, which goes back to the rank of the score. In
the embedding, the rows that a rank asks for are sent to it, and their gradients are sent back.

The loss of a rank is of its own scores, and its scale is such that the mean over ranks is the loss of all. So gradients
of weights are divided by the number of ranks, as `fully_shard` does for other weights. All calls are of all ranks
together.

Ranks may also hold the same tokens and scores, as in tensor parallelism. Then nothing travels but what is put together:
the statistics of a score, the rows of the embedding, and the gradient of a hidden state, which are sums over ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lowtide.compat.gloo import exchange_between_ranks, gather_from_ranks, sum_own_of_ranks
from lowtide.ops.in_place import add_rows
from lowtide.ops.logits.compared_rows import ComparedRows
from lowtide.ops.logits.logit_rows import RowStats, Slopes, Want
from lowtide.ops.logits.rows_of import Rows


@dataclass(frozen=True, eq=False)
class SplitVocabulary:
    """The ranks that hold a vocabulary, and the exchanges between them.

    Rows are cut as by `torch.chunk`: all ranks have equally many, but the last may have fewer; none is without.
    """

    group: dist.ProcessGroup
    vocab: int
    """Rows of all ranks."""
    same_scores: bool = False
    """Whether the ranks hold the same tokens and scores, and compute the same loss."""
    alone: ClassVar[bool] = False
    """Whether exchanges take memory, and ask no other rank."""

    @functools.cached_property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @functools.cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def each(self) -> int:
        """Rows of every rank but the last, which may have fewer."""
        return -(-self.vocab // self.ranks)

    @property
    def first(self) -> int:
        """The token of the first row that lies here."""
        return self.rank * self.each

    @property
    def rows(self) -> int:
        """How many rows lie here."""
        return min(self.vocab - self.first, self.each)

    def gathered(self, x: Shaped[Tensor, "own ..."]) -> Shaped[Tensor, "everyones ..."]:
        """What each rank gives, one after the other; all give equally much."""
        if SplitVocabulary.alone:
            return x.repeat(self.ranks, *[1] * (x.dim() - 1))
        found = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        gather_from_ranks(found, x, self.group)
        return found

    def all_columns(self, x: Shaped[Tensor, "rows own"]) -> Shaped[Tensor, "rows vocab"]:
        """The logits of all tokens, from those of this rank's; ranks have the same rows."""
        own = F.pad(x, (0, self.each - self.rows))
        return self.gathered(own.T.contiguous())[: self.vocab].T.contiguous()

    def own_rows(self, x: Shaped[Tensor, "vocab ..."]) -> Shaped[Tensor, "own ..."]:
        """Those of this rank, of what has a row for each token, or for as many as there are."""
        return x[self.first : self.first + self.rows]

    def summed_own(self, x: Shaped[Tensor, "everyones ..."]) -> Shaped[Tensor, "own ..."]:
        """This rank's part, by the order of `gathered`, of the sum over ranks."""
        found = x.new_empty(x.shape[0] // self.ranks, *x.shape[1:])
        if SplitVocabulary.alone:
            return found.copy_(x[: len(found)])
        sum_own_of_ranks(found, x, self.group)
        return found

    def summed(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The sum over ranks, on all of them."""
        found = x.clone(memory_format=torch.contiguous_format)
        if not SplitVocabulary.alone:
            dist.all_reduce(found, group=self.group)
        return found

    def exchanged(self, x: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Sends `sent[r]` of what comes first to rank r, and so on, and takes `taken[r]` from it."""
        if SplitVocabulary.alone:
            return x.clone()
        found = x.new_empty(sum(taken), *x.shape[1:])
        exchange_between_ranks(found, x, taken, sent, self.group)
        return found


@contextlib.contextmanager
def exchanging_nothing() -> Iterator[None]:
    """While it lasts, a rank runs alone, with numbers that mean nothing and the memory that exchanges take."""
    before, SplitVocabulary.alone = SplitVocabulary.alone, True
    try:
        yield
    finally:
        SplitVocabulary.alone = before


# -- the head ------------------------------------------------------------------------------------------------------


class SplitScores:
    """The scores of all ranks, as the head goes through them: equally many of each rank at a time, padded.

    They are in the order in which they come: by chunk, then by rank.
    """

    def __init__(
        self, split: SplitVocabulary, index: Int[Tensor, " own"], target: Int[Tensor, " own"], most_at_once: int
    ) -> None:
        """`index` and `target` are of this rank's own scores; `most_at_once` of all ranks."""
        self.split, self.index, self.count = split, index, len(index)
        longest = int(split.gathered(torch.tensor([self.count], device=index.device)).max())
        self.own_rows = min(max(most_at_once // split.ranks, 1), longest)
        self.rows = self.own_rows * split.ranks
        self.chunks = -(-longest // self.own_rows) if longest else 0
        self.target = self.of_all(target)
        self.factor = 1 / split.ranks

    def spans(self) -> Iterator[slice]:
        """The scores of each chunk."""
        return (slice(start, start + self.rows) for start in range(0, self.chunks * self.rows, max(self.rows, 1)))

    def own_span(self, span: slice) -> slice:
        """Which of this rank's scores are in a chunk."""
        start = span.start // self.split.ranks
        return slice(start, start + self.own_rows)

    def _own(self, span: slice) -> Tensor:
        """[some]: the places of the hidden states of this rank's scores in a chunk; fewer in the last."""
        return self.index[self.own_span(span)]

    def taken(self, x: Float[Tensor, "tokens hidden"], span: slice, dtype: torch.dtype) -> Float[Tensor, "rows hidden"]:
        """The hidden states of a chunk."""
        return self.split.gathered(self._padded(x.index_select(0, self._own(span)).to(dtype), self.own_rows))

    def add_back(self, into: Float[Tensor, "tokens hidden"], span: slice, x: Float[Tensor, "rows hidden"]) -> None:
        """Adds up what the ranks found of the gradients of a chunk's hidden states, those of each rank there."""
        own, found = self._own(span), self.split.summed_own(x)
        into.index_add_(0, own, found[: len(own)])

    def of_own(self, stats: RowStats, span: slice) -> RowStats:
        """The statistics of this rank's scores in a chunk."""
        start = self.split.rank * self.own_rows
        count = len(self._own(span))
        return RowStats(*(column[start : start + count] for column in stats))

    def of_everyone(self, slopes: Slopes) -> Slopes:
        """The slopes of all ranks in a chunk, from this rank's."""
        first, *rest = (None if s is None else self.split.gathered(self._padded(s, self.own_rows)) for s in slopes)
        assert first is not None
        return Slopes(first, *rest)

    def of_all(self, own: Shaped[Tensor, " own"]) -> Shaped[Tensor, " everyones"]:
        """The values of all scores of all ranks, from those of this rank's; zero for what pads."""
        found = self.split.gathered(self._padded(own, self.chunks * self.own_rows))
        return found.view(self.split.ranks, self.chunks, self.own_rows).transpose(0, 1).flatten()

    def own(self, everyones: Shaped[Tensor, " everyones"]) -> Shaped[Tensor, " own"]:
        """The values of this rank's scores, from those of all."""
        if not len(everyones):  # not asked for
            return everyones
        of_ranks = everyones.view(self.chunks, self.split.ranks, self.own_rows)
        return of_ranks[:, self.split.rank].flatten()[: self.count]

    def slopes_of_all(self, slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The slopes of all scores, each where any rank has it: one without scores may have none."""
        there = torch.tensor([[slope is not None for slope in slopes]], device=self.index.device)
        wanted = self.split.gathered(there.to(torch.int32)).amax(0).tolist()
        dtype = next((slope.dtype for slope in slopes if slope is not None), torch.float32)
        nothing = torch.zeros(self.count, dtype=dtype, device=self.index.device)
        pairs = zip(slopes, wanted, strict=True)
        return [self.of_all(nothing if slope is None else slope) if want else None for slope, want in pairs]

    @staticmethod
    def _padded(x: Tensor, rows: int) -> Tensor:
        if len(x) == rows:
            return x
        found = x.new_zeros(rows, *x.shape[1:])
        found[: len(x)] = x
        return found


class SplitRows:
    """Rows of logits of which some columns lie here (see `ops.logits.logit_rows`); their statistics are of all
    columns."""

    def __init__(self, split: SplitVocabulary, target: Tensor, of: Callable[[Tensor], Rows]) -> None:
        """`target` [rows] is among all columns; `of` makes the rows with a target among those here, else -1."""
        self.split = split
        column = target - split.first
        self.here = (column >= 0) & (column < split.rows)
        self.inner = of(column.masked_fill(~self.here, -1))

    def stats(self, want: Want, keep: bool) -> RowStats:
        """The statistics, equal on all ranks; `keep` as there."""
        chosen, top = self.inner.ends()
        found = self.inner.stats(want._replace(top1=False), keep)
        columns = {"lse": found.lse, "chosen": chosen.masked_fill(~self.here, 0)}
        if want.top1:
            columns["top"] = top
        if want.entropies:
            columns["entropy"] = found.entropies
        if want.mean_logprobs:
            columns["sum"] = (found.mean_logprobs + found.lse) * self.split.rows
        if want.collisions:
            columns["collision"] = found.collisions
        if isinstance(self.inner, ComparedRows):
            columns["theirs"] = self.inner.their_lse()
        gathered = self.split.gathered(torch.stack([*columns.values()])).unflatten(0, (self.split.ranks, -1))
        parts = dict(zip(columns, gathered.unbind(1), strict=True))
        lse = parts["lse"].logsumexp(0)
        drop = parts["lse"] - lse  # the log of the probability of each rank's columns
        chosen, empty = parts["chosen"].sum(0), lse.new_empty(0)
        self.inner.settle(lse)
        divergences = empty
        if isinstance(self.inner, ComparedRows):
            divergences = self.inner.compare(parts["theirs"].logsumexp(0), self.split.summed)
        return RowStats(
            chosen - lse,
            (drop.exp() * (parts["entropy"] - drop)).sum(0) if want.entropies else empty,
            parts["sum"].sum(0) / self.split.vocab - lse if want.mean_logprobs else empty,
            chosen >= parts["top"].amax(0) if want.top1 else empty.bool(),
            lse,
            (parts["collision"] + 2 * drop).logsumexp(0) if want.collisions else empty,
            divergences,
            empty,
        )

    def restore(self, lse: Tensor, keep: bool) -> None:
        self.inner.restore(lse, keep)

    def gradient(self, slopes: Slopes, entropies: Tensor) -> None:
        self.inner.gradient(slopes, entropies)


# -- the embedding -------------------------------------------------------------------------------------------------


class Lookup:
    """The rows of some tokens, asked of the ranks that hold them; each token once, however often it comes."""

    def __init__(self, split: SplitVocabulary, token_ids: Int[Tensor, " tokens"]) -> None:
        self.split = split
        asked, self.place = token_ids.unique(return_inverse=True)  # in order, so that those of a rank are together
        counts = torch.bincount(asked // split.each, minlength=split.ranks)
        self.sent: list[int] = counts.tolist()
        ones = [1] * split.ranks
        self.taken: list[int] = split.exchanged(counts, ones, ones).tolist()
        self.rows = split.exchanged(asked, self.sent, self.taken) - split.first
        """[answered]: the rows that lie here and are asked for by any rank."""
        if SplitVocabulary.alone:
            self.rows %= split.rows

    def answered(self, rows: Float[Tensor, "answered hidden"]) -> Float[Tensor, "tokens hidden"]:
        """The rows of this rank's tokens."""
        return self.split.exchanged(rows, self.taken, self.sent).index_select(0, self.place)

    def returned(self, grad: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "answered hidden"]:
        """The gradients of `rows`, from those of this rank's tokens."""
        asked = grad.new_zeros(sum(self.sent), grad.shape[1])
        add_rows(asked, self.place, grad)
        return self.split.exchanged(asked, self.sent, self.taken) / self.split.ranks


class SharedLookup:
    """The rows of tokens that all ranks ask for alike: each gives those that lie there, and they are added up."""

    def __init__(self, split: SplitVocabulary, token_ids: Int[Tensor, " tokens"]) -> None:
        row = token_ids - split.first
        self.split, self.elsewhere = split, ((row < 0) | (row >= split.rows))[:, None]
        self.rows = row.clamp(0, split.rows - 1)
        """[tokens]: the rows that lie here, and any row for tokens elsewhere."""

    def answered(self, rows: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """The rows of the tokens."""
        return self.split.summed(rows.masked_fill(self.elsewhere, 0))

    def returned(self, grad: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """The gradients of `rows`, from those of the tokens."""
        return grad.masked_fill(self.elsewhere, 0)
