"""In which order rows are trained on: by their lengths where that is wanted, and again the same in a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from transformers.trainer_utils import has_length

from lowtide.trainers.checkpoints.whole import saved_run_state

logger = logging.getLogger(__name__)


class GroupedByLength(LengthGroupedSampler):
    """Rows of about the same length together, in an order that is the epoch's, whatever was drawn before."""

    def __init__(self, batch_size: int, lengths: Sequence[int], seed: int) -> None:
        super().__init__(batch_size, lengths=list(lengths))
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class DealtEvenly(BatchSampler):
    """The batches of another sampler, and of each step the same rows, dealt so that no rank waits long for another.

    Ranks of a step wait for the one with most tokens. So the rows of a step go, the longest first, to the rank that has
    fewest tokens so far; each gets as many rows as without. A loss is a sum over the rows of all ranks, so no number of
    a step depends on which rank computes a row. Steps that are not full keep their order.

    Args:
        lengths: [rows], the tokens of each.
        ranks: that take one batch after the other, in turn.
        batches: of each rank in a step.
    """

    def __init__(self, plain: BatchSampler, lengths: np.ndarray, ranks: int, batches: int) -> None:
        super().__init__(plain.sampler, plain.batch_size, plain.drop_last)
        self.lengths, self.ranks, self.batches = lengths, ranks, batches

    def __iter__(self) -> Iterator[list[int]]:
        step: list[list[int]] = []
        for batch in super().__iter__():
            step.append(batch)
            if len(step) == self.ranks * self.batches:
                yield from self._dealt(step) if len(batch) == self.batch_size else step
                step = []
        yield from step

    def _dealt(self, step: list[list[int]]) -> list[list[int]]:
        before = [[row for batch in step[rank :: self.ranks] for row in batch] for rank in range(self.ranks)]
        dealt = deal_evenly([[int(self.lengths[row]) for row in rows] for rows in before])
        after = [[before[rank][place] for rank, place in places] for places in dealt]
        size = self.batch_size
        return [
            after[rank][size * turn : size * (turn + 1)] for turn in range(self.batches) for rank in range(self.ranks)
        ]


def deal_evenly(lengths: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """For each rank (rank, place) of the rows that it gets, in that order: as they were, where nothing is gained.

    Args:
        lengths: of the rows of each rank, equally many of each.
    """
    each = len(lengths[0])
    before = [[(rank, place) for place in range(each)] for rank in range(len(lengths))]
    found: list[list[tuple[int, int]]] = [[] for _ in lengths]
    tokens = [0] * len(lengths)
    everything = [row for rows in before for row in rows]
    for row in sorted(everything, key=lambda row: -lengths[row[0]][row[1]]):
        rank = min((rank for rank in range(len(found)) if len(found[rank]) < each), key=tokens.__getitem__)
        found[rank].append(row)
        tokens[rank] += lengths[row[0]][row[1]]
    return [sorted(rows) for rows in found] if max(tokens) < max(map(sum, lengths)) else before


class CountedPass:
    """A stream whose rows are counted as they are read.

    Attributes:
        count: the rows of the last pass that was read to its end; None before there was one.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.count: int | None = None

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for row in self.stream:
            count += 1
            yield row
        self.count = count

    def __len__(self) -> int:
        return len(self.stream)

    def __getattr__(self, name: str) -> Any:
        """What else the stream has."""
        if name == "stream":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.stream, name)


def own_rows(accelerator: Accelerator, rows: int) -> int:
    """How many rows of the batch that was taken last are this rank's own: the last batch of a dataset is filled up with
    its first rows, so that ranks take equally many. (Of a stream that other processes read they count as its own.)"""
    loader: Any = accelerator.gradient_state.active_dataloader
    if loader is None or not loader.end_of_dataloader:
        return rows
    shard = _shard_of(loader)
    if shard is None or shard.drop_last or not getattr(shard, "even_batches", True):
        return rows
    stream = getattr(loader.dataset, "dataset", None)
    sampler = getattr(getattr(shard, "batch_sampler", None), "sampler", loader.dataset)
    whole = stream.count if isinstance(stream, CountedPass) else len(sampler)
    own = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    left = (whole or 0) % (own * shard.num_processes)
    return max(0, min(rows, left - own * shard.process_index)) if left else rows


def _shard_of(loader: Any) -> Any:
    """What deals the rows of a loader to ranks; None where nothing does."""
    if isinstance(loader.dataset, IterableDatasetShard):
        return loader.dataset
    shard = getattr(loader, "batch_sampler", None)
    while shard is not None and not isinstance(shard, BatchSamplerShard):
        shard = getattr(shard, "batch_sampler", None)
    return shard


def counted(loader: DataLoader) -> DataLoader:
    """A loader whose stream is counted, where it is dealt to ranks."""
    shard: Any = _shard_of(loader)
    if shard is loader.dataset and not isinstance(shard.dataset, CountedPass):
        shard.dataset = CountedPass(shard.dataset)
    return loader


class RowOrder:
    """The order in which a trainer takes rows: it knows the lengths of rows of all kinds, and finds its place in a
    stream again. What the Trainer makes comes as a function `theirs`.

    Attributes:
        place: the pass over the rows, and the batches of it that were taken.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.place: tuple[int, int] = (0, 0)

    def train_sampler(self, rows: Any, theirs: Callable[[Any], Sampler | None]) -> Sampler | None:
        """The Trainer's, which looks for the lengths of rows in a column, and for whom each rank has its own; rows
        of like lengths meet in the batches of all ranks together, so that the order is that of one rank."""
        args = self.args
        rows = self.trainer.train_dataset if rows is None else rows
        column = args.length_column_name
        if args.train_sampling_strategy in ("group_by_length", "batch_rebalance") and has_length(rows):
            lengths = None if column in getattr(rows, "column_names", ()) else self.trainer.row_lengths(rows)
            rows = rows if lengths is None else Dataset.from_dict({column: lengths})
        sampler = theirs(rows)
        if isinstance(sampler, BatchRebalanceSampler):
            rows_in_all = args.train_batch_size * args.gradient_accumulation_steps * args.data_ranks
            ours = {"dp_size": args.data_ranks, "rank": args.data_rank, "effective_batch_size": rows_in_all}
            return BatchRebalanceSampler(
                sampler.lengths, grad_accum=sampler.grad_accum, drop_last=sampler.drop_last, **ours
            )
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = args.seed if args.data_seed is None else args.data_seed
        return GroupedByLength(sampler.batch_size * args.data_ranks, sampler.lengths, seed)

    def eval_sampler(self, rows: Any, theirs: Callable[[Any], Sampler | None]) -> Sampler | None:
        """The Trainer's."""
        return theirs(rows)

    def loader(self, theirs: Callable[..., DataLoader], dataset: Any, size: int, *, training: bool) -> DataLoader:
        """The Trainer's loader of a dataset, `size` rows at a time."""
        return theirs(dataset, size)

    def train_loader(self, theirs: Callable[[], DataLoader]) -> DataLoader:
        """The Trainer's; the rows of a step are dealt evenly to ranks, where their lengths are known."""
        loader = counted(theirs())
        shard: Any = loader.batch_sampler
        deals = isinstance(shard, BatchSamplerShard) and type(shard.batch_sampler) is BatchSampler
        if deals and self.trainer.deals_rows:
            lengths = None if shard.split_batches else self.trainer.row_lengths()
            if lengths is not None:
                turns = self.args.gradient_accumulation_steps
                shard.batch_sampler = DealtEvenly(shard.batch_sampler, lengths, shard.num_processes, turns)
        return loader

    def advance(self) -> None:
        """One more batch of this pass is taken."""
        self.place = (self.place[0], self.place[1] + 1)

    @property
    def fewest(self) -> int:
        """Rows of all ranks below which there is no batch."""
        return 1

    def check_read(self) -> None:
        """Looks at what was taken, once a pass has ended.

        Raises:
            ValueError: the first pass gave no batch.
        """
        if self.place == (0, 0):
            raise ValueError(f"train_dataset gave no batch, so that nothing can be trained: {self._why_none()}")

    def _why_none(self) -> str:
        rows = f"the stream has less than {self.fewest} rows with something to train on"
        if self.args.dataloader_drop_last:
            rows = "dataloader_drop_last=True drops a last batch that is not full, and there are not rows for one"
        return f"{rows}. Pass more rows, or longer ones (max_length)"

    def begin_epoch(self, loader: DataLoader, epoch: int, taken: int) -> None:
        """A pass over the rows, of which so many batches were taken before."""
        self.place = epoch, taken
        _set_epoch(loader, epoch)

    def resumed_at(self, checkpoint: str | None, start: tuple[int, int]) -> tuple[int, int]:
        """Where a resumed run is in its rows: where the Trainer has it, which takes a stream for one that does not
        end, or where the stream was."""
        if checkpoint is None or has_length(self.trainer.train_dataset) or self.args.ignore_data_skip:
            return start
        place = saved_run_state(checkpoint).get("place")
        if place is None:
            logger.warning(
                f"{checkpoint} does not say how far the stream was read: it goes on behind the first {start[1]} "
                "batches of its first pass, or with its second pass where it has fewer"
            )
            return start
        return place[0], place[1]


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tells each sampler below a loader; accelerate does not reach those of several ranks where batches are skipped."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
